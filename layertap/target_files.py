"""What a trainer needs of the target beside its states: config, tokenizer, embedding, head and final norm.

They lie under `target/` in a root, as a checkpoint of Hugging Face's layout that holds just these tensors
under their own names: what loads an embedding or a head from a target's folder loads them from there. They
are copied from the target's files byte by byte, not through the device. target.json is written last.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from layertap.checkpoint import Checkpoint, StoredTensor, embedding_name, head_names
from layertap.checksums import CHUNK_BYTES, file_checksum
from layertap.errors import AlreadyExistsError, CatalogError, IntegrityError, NotFoundError, TargetError
from layertap.folder import replacing
from layertap.norms import FinalNorm, identify_norm
from layertap.records import check_format, get_checked, known_fields, read_record, to_json
from layertap.spec import FORMAT_VERSION
from layertap.store import Buffer, Store, checksum_text, crc64nvme
from layertap.target import Target
from layertap.target_info import WEIGHTS_INDEX, Source, find_backbone, load_config, meta_model

RECORD = "target/target.json"

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a target that are copied where it has them."""

PLAIN_DTYPES = ("BF16", "F16", "F32")

COMPARED_ROWS = 64

Part = Literal["embed_tokens", "lm_head", "final_norm"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """What lies under `target/`: target.json."""

    target_identity: str

    files: dict[str, dict[str, Any]]
    """Name under `target/` -> size in bytes and checksum."""

    tensors: dict[str, dict[str, Any]]
    """`embed_tokens`, `lm_head`, `final_norm` -> file, name, dtype and shape; a head that is the embedding
    itself has only `tied_to`."""

    final_norm: dict[str, Any] | None
    """Kind, order, eps and dtype of the final norm; see `FinalNorm`."""

    missing: dict[str, str] = field(default_factory=dict)
    """What of these is not there, and why."""

    format_version: str = FORMAT_VERSION

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`.

        Raises:
            FormatError: written by a newer major format.
        """
        check_format("target.json", values["format_version"])
        return cls(**known_fields(cls, values))


def store_target(store: Store, target: Target) -> None:
    """Copy what trainers need of a loaded target into the root, unless it is there.

    Raises:
        TargetError: the files aren't those that the target was loaded from.
    """
    if store.exists(RECORD):
        return
    folder = _local_folder(target)
    parts, missing = _find_parts(target, folder)
    texts = [name for name in TEXT_FILES if (folder / name).is_file()]
    files = {name: _put_bytes(store, name, (folder / name).read_bytes()) for name in texts}
    for part, tensor in parts.items():
        files[_file_of(part)] = _put(store, _file_of(part), tensor.chunks)
    index = {tensor.name: _file_of(part) for part, tensor in parts.items()}
    total = sum(tensor.nbytes for tensor in parts.values())
    index_json = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1).encode()
    files[WEIGHTS_INDEX] = _put_bytes(store, WEIGHTS_INDEX, index_json)
    norm = _identify(target, parts, missing)
    tensors = {part: _describe(part, tensor) for part, tensor in parts.items()}
    if "lm_head" not in tensors and "lm_head" not in missing:
        tensors["lm_head"] = {"tied_to": "embed_tokens"}
    for part, reason in missing.items():
        log.warning("the root will hold no %s of the target: %s", part, reason)
    record = TargetRecord(
        target_identity=target.info.identity,
        files=files,
        tensors=tensors,
        final_norm=norm.record if norm else None,
        missing=missing,
    )
    with contextlib.suppress(AlreadyExistsError):  # another first lane, with the same bytes
        store.create(RECORD, to_json(asdict(record)))


def _local_folder(target: Target) -> Path:
    """Where the files of a target that has been loaded lie on this host."""
    info = target.info
    if info.revision is None:
        return Path(info.source).expanduser()
    from huggingface_hub import snapshot_download

    patterns = [*TEXT_FILES, "model*.safetensors", WEIGHTS_INDEX]
    return Path(snapshot_download(info.source, revision=info.revision, allow_patterns=patterns))


def _find_parts(target: Target, folder: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of the checkpoint, and why some are not among them."""
    info = target.info
    config = load_config(Source(path=info.source, revision=info.revision, identity=info.identity))
    model: Any = meta_model(config, info.source)
    backbone, checkpoint = find_backbone(model), Checkpoint(folder)
    prefix = checkpoint.decoder_prefix(backbone.layers_name, info.num_hidden_layers)
    found = {
        "embed_tokens": checkpoint.get(f"{prefix}{embedding_name(backbone)}.weight"),
        "final_norm": checkpoint.get(f"{prefix}{backbone.norm_name}.weight"),
    }
    names = head_names(model)
    head = checkpoint.head(f"{names[0]}.weight", prefix) if names else None
    if head or not _is_tied(config):
        found["lm_head"] = head
    missing = {part: "the checkpoint has no such tensor" for part, tensor in found.items() if tensor is None}
    missing |= {
        part: f"{tensor.name} is quantised ({tensor.dtype})"
        for part, tensor in found.items()
        if tensor is not None and tensor.dtype not in PLAIN_DTYPES
    }
    parts = {part: tensor for part, tensor in found.items() if tensor is not None and part not in missing}
    if "embed_tokens" in parts:
        _check_embedding(target, parts["embed_tokens"])
    return parts, missing


def _is_tied(config: Any) -> bool:
    """Whether a head that the checkpoint lacks is the embedding: a wrapper or its text part says so."""
    configs = (config, config.get_text_config())
    return any(getattr(each, "tie_word_embeddings", False) for each in configs)


def _check_embedding(target: Target, tensor: StoredTensor) -> None:
    """The tensor found by its name must be the one that the target runs with."""
    with safe_open(tensor.file, "pt") as file:
        rows = file.get_slice(tensor.name)[:COMPARED_ROWS]
    loaded = target.embedding[:COMPARED_ROWS].cpu()
    if not torch.equal(rows.to(loaded.dtype), loaded):
        raise TargetError(
            f"{tensor.name} of {tensor.file} isn't the embedding that target {target.info.source!r} was "
            "loaded with: the files have changed since, or transformers renames them; leave the folder alone"
        )


def _identify(target: Target, parts: Mapping[str, StoredTensor], missing: dict[str, str]) -> FinalNorm | None:
    if "final_norm" not in parts:
        return None
    with safe_open(parts["final_norm"].file, "pt") as file:
        norm = identify_norm(target.final_norm, file.get_tensor(parts["final_norm"].name))
    if norm is None:
        kind = type(target.final_norm).__name__
        missing["final_norm"] = f"{kind} is no RMS norm of a form that layertap knows"
    return norm


def _describe(part: str, tensor: StoredTensor) -> dict[str, Any]:
    return {
        "file": _file_of(part),
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
    }


def _file_of(part: str) -> str:
    return f"{part}.safetensors"


def _put_bytes(store: Store, name: str, data: bytes) -> dict[str, Any]:
    return _put(store, name, lambda: iter([data]))


def _put(store: Store, name: str, chunks: Callable[[], Iterator[bytes]]) -> dict[str, Any]:
    """Write a file under `target/`; returns its size and checksum."""
    content = store.put_chunks(f"target/{name}", chunks)
    assert content.crc is not None
    return {"size": content.nbytes, "checksum": checksum_text(content.crc)}


class TargetFiles:
    """The side data of a root.

    Raises:
        CatalogError: the root has none.
        FormatError: written by a newer major format.
        IntegrityError: its record is damaged.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        try:
            data = store.get(RECORD)
        except NotFoundError as error:
            raise CatalogError(
                f"{store.uri} holds nothing of its target beside the states: there is no {RECORD}. The first "
                "lane of a run writes it, into an older root too: start one with a row that isn't stored yet"
            ) from error
        self.record = read_record(RECORD, data, TargetRecord.from_dict)

    @property
    def config(self) -> dict[str, Any]:
        """The target's config.json.

        Raises:
            IntegrityError: it was damaged.
        """
        config: dict[str, Any] = json.loads(self._get("config.json"))
        return config

    def weight(self, part: Part) -> Tensor:
        """The embedding [vocabulary, H], the head [vocabulary, H] or the norm's weight [H].

        In the checkpoint's dtype; a head that is tied is the embedding.

        Raises:
            CatalogError: the checkpoint had none that can be read; says why.
            IntegrityError: its file was damaged.
        """
        described = self.describe(part)
        local = self.store.local_path(f"target/{described['file']}")
        if local is None:
            return load(self._get(described["file"]))[described["name"]]
        self.check(described["file"])
        with safe_open(local, "pt") as file:
            found: Tensor = file.get_tensor(described["name"])
        return found

    def describe(self, part: Part) -> dict[str, Any]:
        """File, name, dtype and shape of a part's tensor; of a tied head, those of the embedding.

        Raises:
            CatalogError: the checkpoint had none that can be read; says why.
        """
        if part in self.record.missing and part not in self.record.tensors:
            raise CatalogError(f"{self.store.uri} has no {part} of the target: {self.record.missing[part]}")
        described = self.record.tensors[part]
        return self.describe(described["tied_to"]) if "tied_to" in described else described

    def final_norm(self) -> FinalNorm:
        """The target's final norm.

        Raises:
            CatalogError: it is of no known form, or the checkpoint had none; says why.
        """
        if self.record.final_norm is None:
            reason = self.record.missing.get("final_norm", "unknown")
            raise CatalogError(
                f"the final norm of this target can't be applied to its states: {reason}. Extract with the "
                "last hidden state post_norm instead"
            )
        return FinalNorm.from_record(self.record.final_norm, self.weight("final_norm"))

    def check(self, name: str) -> None:
        """Read a file back, in pieces.

        Raises:
            NotFoundError: it is gone.
            IntegrityError: it hasn't the bytes that were written, in two tries.
        """
        written = self.record.files[name]
        if not any(self._read(name) == (written["size"], written["checksum"]) for _ in range(2)):
            raise self._damaged(name)

    def _read(self, name: str) -> tuple[int, str]:
        """Size and checksum of a file as it is now."""
        size, crc = self.store.head(f"target/{name}").size, 0
        for piece in self._pieces(name, size):
            crc = crc64nvme(piece, crc)
        return size, checksum_text(crc)

    def _pieces(self, name: str, size: int) -> Iterator[Buffer]:
        for at in range(0, size, CHUNK_BYTES):
            yield self.store.get_range(f"target/{name}", at, min(CHUNK_BYTES, size - at))

    def _get(self, name: str) -> bytes:
        return get_checked(self.store, f"target/{name}", self.record.files[name]["checksum"])

    def _damaged(self, name: str) -> IntegrityError:
        return IntegrityError(f"{self.store.uri}/target/{name} hasn't the bytes that were written")

    def copy_to(self, folder: Path) -> None:
        """Copy all files to a folder that loads as a target's; what is there already is left alone.

        Raises:
            IntegrityError: a file arrives damaged, twice.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, written in self.record.files.items():
            path = folder / name
            if not path.exists():
                with replacing(path) as part:
                    if not any(self._fetch(name, part) == written["checksum"] for _ in range(2)):
                        raise self._damaged(name)

    def _fetch(self, name: str, path: Path) -> str:
        """Copy one file; returns its checksum."""
        size = self.record.files[name]["size"]
        local = self.store.local_path(f"target/{name}")
        with path.open("wb") as file:
            if local is not None:
                with local.open("rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                file.writelines(self._pieces(name, size))
        return file_checksum(path)
