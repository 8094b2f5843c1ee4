"""What a target is, without loading its weights: identity, shape, layers; and a drafter's layer ids."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from layertap.errors import SpecError, TargetError
from layertap.kernels import keep_gpu_kernels_out
from layertap.plan import H200_FLOPS_PER_S
from layertap.records import known_fields
from layertap.spec import ExtractionSpec
from layertap.staging import slots_for

CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies transformers chooses anew for each batch, by its longest row."""

OF_WRONG_VALUES = (ValueError, TypeError, AttributeError, ArithmeticError)
"""What transformers raises on a config with values that it can't compute with."""

NULLABLE = ("revision", "quantization", "max_positions", "length_dependent_above")
"""Fields of a target that say nothing of it where they are null, and as much where a root lacks them."""

_LAYER_NAMES = ("layers", "h", "blocks")
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


FETCHED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""Files of a hub repository that a lane needs, or a root keeps: weights, configs, tokenizer, template."""


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What is known of a target from its config and files."""

    source: str
    """Hub id or folder, as the user gave it."""

    revision: str | None
    """Commit on the hub; None for a folder."""

    identity: str
    """`hub:<repo>@<commit>` or `folder:<hash of the config and weight files>`."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int

    vocab_size: int
    """Rows of the embedding: token ids are below it."""

    num_parameters: int
    """Parameters of the decoder layers that a token is multiplied with: embedding, head and norms are not
    counted, and of a mixture of experts only those a token is routed to."""

    quantization: dict[str, Any] | None
    """The checkpoint's `quantization_config`, or None."""

    max_positions: int | None
    """Tokens that a row may have: the config's `max_position_embeddings`, or None where it has none."""

    length_dependent_above: int | None
    """Tokens of the longest row in a batch above which the states of all its rows depend on that length; None
    where they never do."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; fields of newer minor formats are ignored.

        Raises:
            KeyError: there is no value for a field that can't be null.
        """
        return cls(**known_fields(cls, {**dict.fromkeys(NULLABLE), **values}))

    def check_length(self, longest: int) -> None:
        """Refuse rows whose states would be wrong for their length.

        Args:
            longest: tokens of the longest row of all.

        Raises:
            TargetError: the target has fewer positions, or a row's states would depend on the rows beside it.
        """
        limit, positions = self.length_dependent_above, self.max_positions
        if limit is not None and longest > limit:
            why = (
                f"above {limit} its rotary embedding (dynamic or longrope) takes its frequencies from the "
                "longest row of a batch, so that a row's states would depend on the rows beside it"
            )
        elif positions is not None and longest > positions:
            limit, why = positions, f"it has {positions} positions (max_position_embeddings)"
        else:
            return
        raise TargetError(
            f"the longest row has {longest} tokens, too many for target {self.source!r}: {why}. Lower "
            f"max_length to {limit}: longer rows are cut then, or left out with too_long='refuse'"
        )

    def executed_parameters(self, spec: ExtractionSpec) -> int:
        """`num_parameters` of the layers that this extraction runs, taking all layers for equal."""
        return (
            self.num_parameters * num_executed_layers(spec, self.num_hidden_layers) // self.num_hidden_layers
        )

    def num_slots(self, spec: ExtractionSpec, max_batch_bytes: int) -> int:
        """How many slots a lane has, reckoned by what an H200 makes of states in a second."""
        tokens_per_s = H200_FLOPS_PER_S / (2 * self.executed_parameters(spec))
        bytes_per_s = tokens_per_s * spec.bytes_per_token(self.hidden_size)
        return slots_for(max_batch_bytes, bytes_per_s=bytes_per_s)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a target's files come from, pinned to their content."""

    path: str
    """Folder, or repository on the hub."""

    revision: str | None
    identity: str

    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    """Of a folder's files, taken before they were hashed: device, inode, size in bytes, mtime in ns."""

    def check_unchanged(self) -> None:
        """Refuse a folder whose files aren't the ones that were hashed.

        Raises:
            TargetError: a file was written to, replaced, added or removed; says which.
        """
        now = _stamps(_hashed_files(Path(self.path))) if self.stamps else {}
        changed = sorted(path for path in now.keys() | self.stamps if now.get(path) != self.stamps.get(path))
        if changed:
            raise TargetError(
                f"{changed[0]} changed while target {self.path!r} was loaded, so its weights may not be "
                f"those of {self.identity}: leave the folder alone during a run, and start again"
            )


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The text decoder inside a model, without its head, and the names of its parts."""

    module: nn.Module
    layers_name: str
    norm_name: str

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers: nn.ModuleList = getattr(self.module, self.layers_name)
        return layers

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        norm: nn.Module = getattr(self.module, self.norm_name)
        return norm


def num_executed_layers(spec: ExtractionSpec, num_hidden_layers: int) -> int:
    """Decoder layers that must run: up to the last one stored."""
    return num_hidden_layers if spec.stores_last else spec.layer_ids[-1] + 1


def inspect_target(source: str, *, revision: str | None = None) -> TargetInfo:
    """Find out what a target is from its config and the identity of its files; nothing is loaded.

    Args:
        source: a hub id (`Qwen/Qwen3-8B`, also offline from the local cache) or a folder.
        revision: branch, tag or commit on the hub.

    Raises:
        TargetError: there is no such target, a file of it is missing or cut short, or its layers can't be
            recognised.
    """
    found = resolve_source(source, revision)
    if not torch.cuda.is_available():
        keep_gpu_kernels_out()
    config = load_config(found)
    return describe(meta_model(config, source), config, source=source, found=found)


def fetch(source: str, *, revision: str | None = None) -> TargetInfo:
    """Bring the files of a hub's target that lanes load onto this host; those of a folder are checked.

    Raises:
        TargetError: there is no such target, the hub can't be reached, or the disk is full.
    """
    if not Path(source).exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            snapshot_download(source, revision=revision, allow_patterns=FETCHED)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise TargetError(f"target {source!r} can't be fetched: {error}") from error
    return inspect_target(source, revision=revision)


def describe(model: nn.Module, config: Any, *, source: str, found: Source) -> TargetInfo:
    """The info of a model, whatever device its parameters are on."""
    backbone = find_backbone(model)
    text_config = config.get_text_config()
    embeddings: Any = backbone.module.get_input_embeddings()  # type: ignore[operator]
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return TargetInfo(
        source=source,
        revision=found.revision,
        identity=found.identity,
        model_type=config.model_type,
        hidden_size=text_config.hidden_size,
        num_hidden_layers=len(backbone.layers),
        vocab_size=embeddings.weight.shape[0],
        num_parameters=sum(_matmul_parameters(backbone.layers, text_config)),
        quantization=quantization,
        max_positions=getattr(text_config, "max_position_embeddings", None),
        length_dependent_above=_length_dependent_above(text_config),
    )


def _length_dependent_above(config: Any) -> int | None:
    """The smallest limit of the config's rotary embeddings, of which each layer type may have its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    limits = [
        p.get("original_max_position_embeddings") or config.max_position_embeddings
        for p in by_layer_type
        if p.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
    return min(limits, default=None)


def _matmul_parameters(layers: nn.ModuleList, config: Any) -> Iterator[int]:
    for name, parameter in layers.named_parameters():
        if parameter.dim() == 2:
            yield parameter.numel()
        elif parameter.dim() == 3 and "experts" in name:
            yield parameter[0].numel() * min(config.num_experts_per_tok, parameter.shape[0])


def find_backbone(model: Any) -> Backbone:
    """The text decoder of a causal language model or of a multimodal wrapper around one.

    Raises:
        TargetError: no list of decoder layers with a final norm is recognised.
    """
    module = model.get_decoder() if hasattr(model, "get_decoder") else model
    children = dict(module.named_children())
    layers_name = next((n for n in _LAYER_NAMES if isinstance(children.get(n), nn.ModuleList)), None)
    norm_name = next((n for n in _NORM_NAMES if n in children), None)
    if layers_name is None or norm_name is None:
        raise TargetError(
            f"{type(model).__name__} can't be tapped: its decoder {type(module).__name__} has the parts "
            f"{', '.join(children) or 'none'}, where a list of decoder layers ({', '.join(_LAYER_NAMES)}) "
            f"and a final norm ({', '.join(_NORM_NAMES)}) are needed. Use a decoder-only language model"
        )
    return Backbone(module=module, layers_name=layers_name, norm_name=norm_name)


def load_config(found: Source) -> Any:
    """The target's config.

    Raises:
        TargetError: transformers doesn't know this model, its config holds a wrong value, or it needs code
            from its repository.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(found.path, revision=found.revision, trust_remote_code=False)
    except (OSError, LookupError, StrictDataclassError, *OF_WRONG_VALUES) as error:
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"target {found.path!r} comes with its own code (`auto_map` in its {CONFIG}), and layertap "
                "runs none of that: take a checkpoint whose architecture transformers has, perhaps in a "
                "newer release"
            ) from error
        raise TargetError(f"the config of target {found.path}/{CONFIG} can't be used: {error}") from error


def meta_model(config: Any, source: str) -> nn.Module:
    """The model without memory for its weights."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise TargetError(
            f"target {source!r} is no causal language model that transformers knows (model type "
            f"{config.model_type!r}): {error}"
        ) from error
    return model


def resolve_source(source: str, revision: str | None) -> Source:
    """Pin a folder to the hash of its files, or a hub id to its commit.

    Raises:
        TargetError: there is no such folder or repository, or the folder lacks a file.
    """
    if not source.strip():
        raise TargetError(f"the target is {source!r}: give a folder with config.json or a hub id")
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise TargetError(f"revision {revision!r} is for the hub, and {source} is a folder: leave it out")
        files = _hashed_files(folder)
        stamps = _stamps(files)
        return Source(path=str(folder), revision=None, identity=f"folder:{_hash_files(files)}", stamps=stamps)
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise TargetError(f"target folder {source} doesn't exist: give a folder with config.json or a hub id")
    commit = _hub_commit(source, revision)
    return Source(path=source, revision=commit, identity=f"hub:{source}@{commit}")


def _hub_commit(repo: str, revision: str | None) -> str:
    """The commit behind a revision: from the hub, or offline from the local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(repo, CONFIG, revision=revision)).parent.name
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise TargetError(
            f"target {repo!r}{at} is no folder here, and neither the hub nor the local cache gives it: "
            f"{error}. Check the name and the network, or give a folder"
        ) from error


def _hashed_files(folder: Path) -> list[Path]:
    """The config and the weight files, which are what a folder's identity covers."""
    files = sorted([folder / CONFIG, *_weight_files(folder)])
    if not files[0].is_file() or not (folder / CONFIG).is_file():
        raise TargetError(
            f"target folder {folder} has no {CONFIG}: give the folder that save_pretrained wrote"
        )
    return files


def _stamps(files: list[Path]) -> dict[Path, tuple[int, ...]]:
    stats = {path: path.stat() for path in files}
    return {path: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for path, s in stats.items()}


def _hash_files(files: list[Path]) -> str:
    """32 hex digits over the names and contents of files."""
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    total = hashlib.blake2b(digest_size=16)
    for path, digest in zip(files, digests, strict=True):
        total.update(f"{path.name}\0{digest}\n".encode())
    return total.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files and their index, each there and whole."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(
            f"target folder {folder} has no *.safetensors file: download the weights, or convert them with "
            "save_pretrained (pickled .bin weights are not read)"
        )
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(named - {path.name for path in files}):
            raise TargetError(
                f"target folder {folder} lacks {', '.join(missing)}, named by {WEIGHTS_INDEX}: copy it too"
            )
        files.append(index)
    for path in files:
        _check_whole(path)
    return files


def _check_whole(path: Path) -> None:
    if path.suffix != ".safetensors":
        return
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise TargetError(f"weight file {path} is cut short or damaged: {error}. Copy it again") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def drafter_layer_ids(path: str | Path) -> tuple[int, ...]:
    """The layers a drafter was built for: `target_layer_ids` of its config, top-level or in `dflash_config`.

    Args:
        path: the drafter's folder or its config.json.

    Raises:
        TargetError: there is no such file or no such field, or the ids follow another convention.
        SpecError: the field holds something else than layer ids.
    """
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TargetError(f"the drafter's config {file} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise TargetError(f"the drafter's config {file} can't be read: it holds no JSON object")
    if "speculators_model_type" in config:
        raise TargetError(
            f"{file} is a config of speculators, whose layer ids are one higher than layertap's: "
            "give the layer ids themselves, each less one"
        )
    ids = config.get("target_layer_ids")
    if ids is None:
        nested = config.get("dflash_config", {})
        if not isinstance(nested, dict):
            raise SpecError(f"dflash_config in {file} is {nested!r}, not an object with target_layer_ids")
        ids = nested.get("target_layer_ids")
    if ids is None:
        raise TargetError(
            f"{file} has no target_layer_ids: give the layer ids themselves; they are never guessed"
        )
    if not isinstance(ids, list) or not ids or any(type(k) is not int for k in ids):
        raise SpecError(f"target_layer_ids in {file} is {ids!r}, not a list of layer ids (integers)")
    return tuple(ids)
