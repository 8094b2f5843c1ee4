"""What dead writers left goes, what counts or may come to count stays; nothing goes unless told so."""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from layertap.catalog import Catalog
from layertap.cli import main
from layertap.dataset import Scan, TokenDataset
from layertap.errors import CatalogError, IntegrityError, StoreError, StoreRefusedError
from layertap.fidelity import Fidelity
from layertap.fidelity import record as record_check
from layertap.garbage import Garbage, find_garbage, old_versions
from layertap.records import MEMORY
from layertap.s3 import Bucket
from layertap.store import Buffer, Store, Upload
from layertap.verify import verify_root
from layertap.versions import Version, Versions
from tests.actors import Actor
from tests.stored import (
    claimed,
    dataset_of,
    extract,
    new_catalog,
    plan_for,
    planned,
    printed_void,
    publish,
    some_rows,
    write_attempt,
)

NOW = timedelta(0)

WRITES = ("put", "create")

CHECK = {
    **dict.fromkeys(("endpoint", "model", "api", "created_at"), "made up"),
    **dict.fromkeys(("num_rows", "num_tokens"), 1),
    **dict.fromkeys(("agreement", "mean_abs_logprob_difference", "min_agreement"), 1.0),
}


def test_only_tries_of_settled_shards_that_nothing_names_are_garbage(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    for shard in (0, 1):  # of a lane that died; then shard 0 is committed by another, shard 1 isn't
        write_attempt(catalog, claimed(catalog, plan, shard), attempt=f"dead-{shard}")
    winner = claimed(catalog, plan, 0, 2)
    catalog.commit(winner, write_attempt(catalog, winner, attempt="winner"))

    garbage = find_garbage(store, older_than=NOW)
    assert garbage.reasons
    assert all("/00000/dead-0/" in path for path in garbage.reasons)
    assert garbage.notes[0].endswith(f"with `layertap void {store.uri} {plan.plan_id} 1 --withdraw`")
    assert not find_garbage(store).reasons, "young files may be in the making"

    garbage.delete()
    assert not find_garbage(store, older_than=NOW).reasons
    verify_root(store, num_rows=None).check()
    catalog.void(plan.plan_id, 1, reason="a test")
    assert all("/00001/dead-1/" in path for path in find_garbage(store, older_than=NOW).reasons)


def test_of_many_shards_the_first_are_named(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(folder_store)
    plan = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)
    for shard in (2, 0, 1):
        write_attempt(catalog, claimed(catalog, plan, shard), attempt="dead")
    monkeypatch.setattr("layertap.garbage.MAX_NAMED", 2)
    (note,) = find_garbage(folder_store, older_than=NOW).notes
    assert printed_void(note) == ["void", folder_store.uri, plan.plan_id, "0", "1", "--withdraw"]
    assert note.endswith("`, the first 2 of 3")


def test_rows_of_a_plan_that_was_never_completed_go_once_they_are_withdrawn(tmp_path: Path) -> None:
    store = Store.folder(tmp_path / "my root")
    catalog = new_catalog(store)
    data = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    died = Actor(lambda store: plan_for(*data, Catalog(store)), Store.folder(store.uri), WRITES)
    died.go_on(1 + 2)
    died.die()
    (plan_id,) = store.folders("plans")
    rows = [info.path for info in store.list("plans")]
    assert len(rows) == 2 and not catalog.plans()

    garbage = find_garbage(store, older_than=NOW)
    (note,) = garbage.notes
    assert not garbage.reasons and "has no record, and rows of 2 shards. Start the run again" in note
    assert printed_void(note) == ["void", store.uri, plan_id, "--all", "--withdraw"]
    catalog.void(plan_id, 0, reason="a test")
    (note,) = find_garbage(store, older_than=NOW).notes
    assert "rows of 1 shards. Runs plan them anew: withdraw" in note, "for nobody writes this plan again"
    assert CliRunner().invoke(main, printed_void(note)).exit_code == 0
    assert not find_garbage(store).reasons, "young ones stay"
    garbage = find_garbage(store, older_than=NOW)
    assert (list(garbage.reasons), garbage.notes) == (rows, [])
    assert len(catalog.without_outcome(planned(*data, catalog).plan_id)) > 2, "who plans next begins anew"


def test_of_a_plan_whose_record_is_gone_what_is_committed_counts_and_stays(
    folder_store: Store, tmp_path: Path
) -> None:
    catalog = new_catalog(folder_store)
    data = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(*data, catalog)
    extract(catalog, plan, [0])
    others = range(1, len(plan.shards))
    folder_store.delete([f"plans/{plan.plan_id}/plan.json"])
    assert len(catalog.settled().keys) == plan.shards[0].num_rows
    (finding,) = verify_root(folder_store, num_rows=None).findings
    assert finding.where == f"plans/{plan.plan_id}/plan.json" and "rows anew" in finding.way_out

    garbage = find_garbage(folder_store, older_than=NOW)
    (note,) = garbage.notes
    assert not garbage.reasons and "Start the run again" not in note, "no run completes it"
    assert printed_void(note) == ["void", folder_store.uri, plan.plan_id, *map(str, others), "--withdraw"]
    again = planned(*data, catalog)
    assert again.plan_id != plan.plan_id
    assert again.num_rows == sum(plan.shards[k].num_rows for k in others)
    extract(catalog, again)
    assert publish(catalog, *data).complete


def test_a_plan_whose_record_is_gone_is_not_written_again(folder_store: Store, tmp_path: Path) -> None:
    """Though the same rows are to be computed: its shards have their outcomes."""
    catalog, data = new_catalog(folder_store), dataset_of(some_rows(1), tmp_path / "rows.parquet")
    plan = plan_for(*data, catalog)
    (key,) = catalog.shard_rows(plan.plan_id, 0).keys
    extract(catalog, plan, refused=[key.tobytes()], fault=MEMORY)
    folder_store.delete([f"plans/{plan.plan_id}/plan.json"])
    again = planned(*data, catalog)
    assert again.plan_id != plan.plan_id and catalog.without_outcome(again.plan_id) == [0]


@pytest.mark.parametrize("are_withdrawn", [False, True])
def test_no_shard_lacks_its_rows_however_late_a_planner_wakes(
    folder_store: Store, tmp_path: Path, are_withdrawn: bool
) -> None:
    """Wherever it slept while gc took what it may, and the rows written so far perhaps were withdrawn."""
    new_catalog(folder_store)
    data = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    for num_requests in count():
        copy = shutil.copytree(tmp_path / "root", tmp_path / f"copy-{num_requests}")
        store, catalog = Store.folder(copy), Catalog(Store.folder(copy))
        planner = Actor(lambda store: planned(*data, Catalog(store)), store, WRITES)
        planner.go_on(num_requests)
        if planner.ended:
            break
        for plan_id in catalog.store.folders("plans"):
            for shard in catalog.shards(plan_id) if are_withdrawn else ():
                catalog.void(plan_id, shard, reason="a test")
        find_garbage(catalog.store, older_than=NOW).delete()
        planner.go_on(1000)
        again = planned(*data, catalog)
        for plan in (planner.result, again):
            for shard in catalog.without_outcome(plan.plan_id):
                assert len(catalog.shard_rows(plan.plan_id, shard).keys)
        assert catalog.without_outcome(again.plan_id)
    assert num_requests > 3


def test_files_of_a_withdrawn_shard_stay_as_long_as_a_version_names_them(
    store: Store, tmp_path: Path
) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan)
    publish(catalog, dataset, scan)
    catalog.void(plan.plan_id, 0, reason="a test")
    assert not find_garbage(store, older_than=NOW).reasons

    extract(catalog, plan_for(dataset, scan, catalog))
    assert publish(catalog, dataset, scan, parent=1).number == 2
    assert not find_garbage(store, older_than=NOW).reasons
    old_versions(store, num_kept=1).delete()
    assert Versions(store).numbers() == [2]
    garbage = find_garbage(store, older_than=NOW)
    assert garbage.reasons
    garbage.delete()
    verify_root(store, num_rows=None).check()


def test_the_newest_complete_version_is_kept_whatever_is_asked(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    for number, num_rows in enumerate((5, 10, 15)):
        dataset, scan = dataset_of(some_rows(num_rows), tmp_path / f"{number}.parquet")
        plan = plan_for(dataset, scan, catalog)
        extract(catalog, plan, shards=range(len(plan.shards) - (num_rows == 15)))
        publish(catalog, dataset, scan, parent=number or None)
    assert [Versions(store).get(n).complete for n in (1, 2, 3)] == [True, True, False]
    garbage = old_versions(store, num_kept=1)
    assert list(garbage.reasons) == ["versions/1.json", Versions(store).get(1).rows["path"]]


def one_of_two_published(
    store: Store, tmp_path: Path
) -> tuple[Catalog, tuple[TokenDataset, Scan], tuple[TokenDataset, Scan]]:
    """A root that holds all of two datasets, and a version of the first."""
    catalog = new_catalog(store)
    first, second = (dataset_of(some_rows(n), tmp_path / f"{n}.parquet") for n in (5, 10))
    for dataset, scan in (first, second):
        extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, *first)
    return catalog, first, second


@contextmanager
def before_the_record(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[pytest.MonkeyPatch], None]
) -> Iterator[None]:
    """Have something happen, by a patch of its own, just before a record is created."""
    create = Store.create

    def acts(self: Store, path: str, data: Buffer) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "create", create)
            act(patch)
        create(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", acts)
        yield


def test_a_version_published_while_old_ones_are_looked_for_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, first, second = one_of_two_published(store, tmp_path)
    monkeypatch.setattr("layertap.garbage.BEING_PUBLISHED", NOW)
    latest = Versions.latest

    def meanwhile(self: Versions) -> Version | None:
        found = latest(self)
        with monkeypatch.context() as patch:
            patch.setattr(Versions, "latest", latest)
            publish(catalog, *second, parent=1)
        return found

    monkeypatch.setattr(Versions, "latest", meanwhile)
    old_versions(store, num_kept=1).delete()
    assert Versions(store).numbers() == [1, 2]
    verify_root(store, num_rows=None).check()


def test_a_table_whose_record_is_about_to_be_written_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the same rows were published before, long ago, and that version may go."""
    catalog, first, second = one_of_two_published(store, tmp_path)
    publish(catalog, *second, parent=1)
    old = old_versions(store, num_kept=1)
    old.reasons[Versions(store).get(1).rows["path"]] = "its version goes too, and it is old enough"
    with before_the_record(monkeypatch, lambda _: old.delete()):
        assert publish(catalog, *first, parent=2).number == 3
    verify_root(store, num_rows=None).check()


class Ahead(datetime):
    """The clock of a host that is wrong by two hours."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=2)


def test_ages_are_told_by_the_store_s_clock(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table stays whose record is about to be written, by whatever clock of the host that prunes."""
    catalog, _, second = one_of_two_published(store, tmp_path)

    def prune(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("layertap.garbage.datetime", Ahead)
        old_versions(store, num_kept=1).delete()
        assert not find_garbage(store, older_than=timedelta(hours=1)).reasons

    with before_the_record(monkeypatch, prune):
        publish(catalog, *second, parent=1)
    verify_root(store, num_rows=None).check()


def test_who_slept_while_rows_of_a_version_were_withdrawn_hears_of_it(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the table of a version that is being published is spared."""
    catalog, _, second = one_of_two_published(folder_store, tmp_path)

    def withdraw(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("layertap.garbage.BEING_PUBLISHED", NOW)
        for plan_id in catalog.plans():
            catalog.void(plan_id, 0, reason="a test")
        find_garbage(folder_store, older_than=NOW).delete()

    with (
        before_the_record(monkeypatch, withdraw),
        pytest.raises(CatalogError, match="was withdrawn while a version was made of it: start the run"),
    ):
        publish(catalog, *second, parent=1)


def test_uploads_that_nobody_ended_are_aborted_under_this_root_and_by_layertap_s_names_alone(
    s3_store: Store,
) -> None:
    new_catalog(s3_store)
    bucket = s3_store._root
    client = bucket._client_of_process()  # type: ignore[union-attr]
    name = bucket.settings.bucket  # type: ignore[union-attr]
    prefix = bucket.settings.prefix  # type: ignore[union-attr]
    others = [f"elsewhere-{secrets.token_hex(4)}/plans/data", f"{prefix}/a-bucket-s-other-data/plans/data"]
    for key in (f"{prefix}/plans/p/data/00000/a/batch-00000.safetensors", *others):
        client.create_multipart_upload(Bucket=name, Key=key)
    garbage = find_garbage(s3_store, older_than=NOW)
    assert [upload.path for upload in garbage.uploads] == ["plans/p/data/00000/a/batch-00000.safetensors"]
    assert not find_garbage(s3_store).uploads
    also = find_garbage(s3_store, older_than=NOW)
    garbage.delete()
    also.delete()  # by another hand, of what is gone by now
    assert not find_garbage(s3_store, older_than=NOW).uploads
    for stranger in others:
        left = client.list_multipart_uploads(Bucket=name, Prefix=stranger)["Uploads"]
        assert [upload["Key"] for upload in left] == [stranger]


def test_an_object_goes_beside_an_upload_of_its_path_that_may_not_be_aborted(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(s3_store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    write_attempt(catalog, claimed(catalog, plan, 0), attempt="dead")
    winner = claimed(catalog, plan, 0, 2)
    catalog.commit(winner, write_attempt(catalog, winner, attempt="winner"))
    path = f"plans/{plan.plan_id}/data/00000/dead/batch-00000.safetensors"
    bucket = s3_store._root
    assert isinstance(bucket, Bucket)
    key = f"{bucket.settings.prefix}/{path}"
    bucket._client_of_process().create_multipart_upload(Bucket=bucket.settings.bucket, Key=key)

    def refuses(self: Bucket, path: str, upload_id: str) -> None:
        raise PermissionError("Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "abort", refuses)
        done = CliRunner().invoke(main, ["gc", s3_store.uri, "--older-than", "0", "--delete"])
    assert not s3_store.exists(path)
    (note,) = [line for line in done.stdout.splitlines() if "upload stays" in line]
    assert path in note and "Permission denied" in note and "lifecycle rule" in note
    assert (done.exit_code, "deleted" in done.stdout.splitlines()) == (1, False)
    assert "Error: 1 of 1 multipart uploads can't be aborted" in done.stderr
    left = find_garbage(s3_store, older_than=NOW)
    assert (list(left.reasons), [upload.path for upload in left.uploads]) == ([], [path])
    left.delete()
    assert not find_garbage(s3_store, older_than=NOW).uploads


def test_a_store_that_goes_away_is_asked_to_abort_no_further_upload(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def is_away(self: Bucket, path: str, upload_id: str) -> None:
        asked.append(path)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(Bucket, "abort", is_away)
    garbage = Garbage(store=s3_store, uploads=[Upload(f"plans/{k}", "id", datetime.now(UTC)) for k in "abc"])
    with pytest.raises(StoreError, match="can't abort the upload of .*/plans/a: nobody listens") as told:
        garbage.delete()
    assert (asked, type(told.value)) == (["plans/a"], StoreError), "another try of it all may help"


@contextmanager
def kept(monkeypatch: pytest.MonkeyPatch, ending: str) -> Iterator[None]:
    """Have the store refuse to delete what ends so, and all that stands behind it in the same request."""
    delete = Store.delete

    def refuses(self: Store, paths: Sequence[str]) -> None:
        must_stay = [path for path in paths if path.endswith(ending)]
        delete(self, paths[: paths.index(must_stay[0])] if must_stay else paths)
        if must_stay:
            raise StoreRefusedError(f"can't delete {must_stay[0]}: Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", refuses)
        yield


def test_all_goes_but_what_the_store_refuses_to_delete_and_that_is_named(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(folder_store)
    plan = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)
    for number in (1, 2):
        write_attempt(catalog, claimed(catalog, plan, 0, number), attempt=f"dead-{number}")
    write_attempt(catalog, claimed(catalog, plan, 1), attempt="idle")
    catalog.void(plan.plan_id, 0, reason="a test")
    num_found = len(find_garbage(folder_store, older_than=NOW).reasons)
    monkeypatch.setattr("layertap.garbage.DELETED_AT_ONCE", 3)
    command = ["gc", folder_store.uri, "--older-than", "0", "--delete"]
    with kept(monkeypatch, "/batch-00001.safetensors"):
        done = CliRunner().invoke(main, command)
    stay = [f"plans/{plan.plan_id}/data/00000/dead-{k}/batch-00001.safetensors" for k in (1, 2)]
    told = (
        f"Error: 2 of {num_found} objects can't be deleted. Mend that, and do the same again. The first of "
        f"them: can't delete {stay[0]}: Perm"
    )
    assert num_found > 6 and list(find_garbage(folder_store, older_than=NOW).reasons) == stay
    assert (done.exit_code, done.stderr[: len(told)]) == (1, told)
    assert "deleted" not in done.stdout.splitlines() and "layertap void" in done.stdout
    assert CliRunner().invoke(main, command).exit_code == 0
    assert not find_garbage(folder_store, older_than=NOW).reasons


def test_a_version_whose_record_must_stay_keeps_its_table(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, _, second = one_of_two_published(folder_store, tmp_path)
    publish(catalog, *second, parent=1)
    refused = pytest.raises(StoreRefusedError, match="1 of 2 objects .*, and 1 tables stay with")
    with kept(monkeypatch, "versions/1.json"), refused:
        old_versions(folder_store, num_kept=1).delete()
    assert Versions(folder_store).numbers() == [1, 2]
    verify_root(folder_store, num_rows=None).check()


def test_temporary_files_may_get_their_name_while_they_are_listed(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_store.put("a", b"1")
    root = folder_store.local_path("a#1").parent  # type: ignore[union-attr]
    for number in range(4):
        (root / f"a#{number}").write_bytes(b"half")
    rglob = Path.rglob

    def renamed(self: Path, pattern: str) -> Iterator[Path]:
        found = list(rglob(self, pattern))
        (root / "a#0").rename(root / "b")
        yield from found
        (root / "a#2").rename(root / "b")

    monkeypatch.setattr(Path, "rglob", renamed)
    assert [info.path for info in folder_store.temporary_files()] == ["a#1", "a#2", "a#3"]


@pytest.mark.parametrize("work", [verify_root, find_garbage, partial(old_versions, num_kept=1)])
def test_versions_may_be_pruned_while_somebody_reads_them(
    work: Callable[[Store], Any], folder_store: Store, tmp_path: Path
) -> None:
    """Before whichever list or read of his it happens, he goes on with those that stay."""
    catalog, first, second = one_of_two_published(folder_store, tmp_path)
    publish(catalog, *second, parent=1)
    record_check(folder_store, Fidelity(**{**CHECK, "version": 1}))
    seen = set()
    for num_requests in count():
        copy = shutil.copytree(tmp_path / "root", tmp_path / f"copy-{num_requests}")
        store = Store.folder(copy)
        reader = Actor(work, store, requests=("list", "get"))
        reader.go_on(num_requests)
        if reader.ended:
            break
        old_versions(Store.folder(copy), num_kept=1).delete()
        reader.go_on(1000)
        assert [info.path for info in store.list("versions")][0] == "versions/2.json"
        if work is verify_root:
            reader.result.check()
            seen.add(str(reader.result).partition("; ")[2])
    assert num_requests > 5
    assert seen == ({"", "version 1 was pruned meanwhile"} if work is verify_root else set())


def withdraw_what_is_not_in_version_1(store: Store) -> None:
    catalog = Catalog(store)
    named = {name.split("/")[1] for name in Versions(store).files(1) or ()}
    (plan_id,) = set(catalog.plans()) - named
    for shard in catalog.committed(plan_id):
        catalog.void(plan_id, shard, reason="a test")


def test_gc_takes_nothing_of_what_is_published_meanwhile(folder_store: Store, tmp_path: Path) -> None:
    """Whatever it has looked at before shards are published and then withdrawn."""
    _, _, second = one_of_two_published(folder_store, tmp_path)
    for num_requests in count():
        copy = shutil.copytree(tmp_path / "root", tmp_path / f"copy-{num_requests}")
        collector = Actor(lambda store: find_garbage(store, older_than=NOW).delete(), Store.folder(copy))
        collector.go_on(num_requests)
        if collector.ended:
            break
        other = Store.folder(copy)
        publish(Catalog(other), *second, parent=1)
        withdraw_what_is_not_in_version_1(other)
        collector.go_on(1000)
        assert all(map(other.exists, Versions(other).files(2) or ()))
    assert num_requests > 5


def test_who_publishes_is_refused_what_gc_has_taken_meanwhile(folder_store: Store, tmp_path: Path) -> None:
    _, _, second = one_of_two_published(folder_store, tmp_path)
    refusals = list[str]()
    for num_requests in count():
        copy = shutil.copytree(tmp_path / "root", tmp_path / f"copy-{num_requests}")
        publisher = Actor(lambda store: publish(Catalog(store), *second, parent=1), Store.folder(copy))
        publisher.go_on(num_requests)
        if publisher.ended:
            break
        other = Store.folder(copy)
        withdraw_what_is_not_in_version_1(other)
        find_garbage(other, older_than=NOW).delete()
        try:
            publisher.go_on(1000)
        except (CatalogError, IntegrityError) as error:  # the latter when it was about to read what is gone
            refusals.append(str(error))
        else:
            assert all(map(other.exists, Versions(other).files(2) or ()))
    assert all("start the run again" in refusal for refusal in refusals)
    assert re.match(r"shard 0 of plan \w+ was withdrawn while a version was made of it", refusals[-1])


def test_checks_of_a_version_go_with_it(store: Store, tmp_path: Path) -> None:
    catalog, first, second = one_of_two_published(store, tmp_path)
    publish(catalog, *second, parent=1)
    for version in (1, 1, 2, 3):
        record_check(store, Fidelity(**{**CHECK, "version": version}))
    old_versions(store, num_kept=1).delete()
    kept = ["versions/2.json", "versions/2.served-1.json", Versions(store).get(2).rows["path"]]
    assert sorted(info.path for info in store.list("versions")) == sorted(kept)


@pytest.mark.parametrize("command", [["gc", "--older-than", "0"], ["prune", "--keep-versions", "1"]])
def test_commands_delete_only_when_told(folder_store: Store, tmp_path: Path, command: list[str]) -> None:
    catalog: Catalog = new_catalog(folder_store)
    for number in (1, 2):
        dataset, scan = dataset_of(some_rows(5 * number), tmp_path / f"{number}.parquet")
        plan = plan_for(dataset, scan, catalog)
        write_attempt(catalog, claimed(catalog, plan, 0, 7), attempt="dead")
        extract(catalog, plan)
        publish(catalog, dataset, scan, parent=number - 1 or None)
    before = [info.path for info in folder_store.list("plans") + folder_store.list("versions")]
    name, *options = command
    shown = CliRunner().invoke(main, [name, folder_store.uri, *options])
    assert shown.exit_code == 0, shown.output
    assert "add --delete to do it" in shown.output
    assert [info.path for info in folder_store.list("plans") + folder_store.list("versions")] == before
    done = CliRunner().invoke(main, [name, folder_store.uri, *options, "--delete"])
    assert done.exit_code == 0, done.output
    after = [info.path for info in folder_store.list("plans") + folder_store.list("versions")]
    assert len(after) < len(before)
    verify_root(folder_store, num_rows=None).check()
