"""What Prefect keeps of shards, written as the lane writes."""

from typing import Self

from prefect.filesystems import WritableFileSystem
from pydantic import PrivateAttr

from layertap.store import Store


class ShardResults(WritableFileSystem):
    """Results where the storage block has them, through the lane's store: with its retries and credentials.

    The block's own client keeps the keys, or the role, that it began with as long as the process lives.
    """

    _store: Store = PrivateAttr()
    _root: str = PrivateAttr()

    @classmethod
    def of(cls, block: WritableFileSystem, store: Store, root: str) -> Self:
        """Results of the root that `store` is, in folder `root` of a block that was loaded."""
        results = cls()
        results._block_document_id = block._block_document_id  # by which others find them
        results._store, results._root = store, root
        return results

    def read_path(self, path: str, _sync: bool = True) -> bytes:  # type: ignore[override]
        """The bytes at a path under the block."""
        return self._store.get(path.removeprefix(f"{self._root}/"))

    def write_path(self, path: str, content: bytes, _sync: bool = True) -> None:  # type: ignore[override]
        """Write a path under the block."""
        self._store.put(path.removeprefix(f"{self._root}/"), content)
