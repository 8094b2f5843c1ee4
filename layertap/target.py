"""The target on its device: chosen layers are tapped with hooks, and what they give is checked.

Layer id k is the output of decoder layer k (Hugging Face `hidden_states[k + 1]`), taken by a forward hook.
Rows are right-padded and no attention mask is given: exact for causal models, linear attention included.
Text only: rows with position ids of their own and multimodal rows can't be extracted.

Shapes: B rows, T tokens of the longest row, H hidden size.
"""

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.compiled import allow_variants, compile_layers
from layertap.errors import SelfCheckError, TargetError
from layertap.gpu_caches import use_caches
from layertap.kernels import keep_gpu_kernels_out, kernels_in_use, refuse_gpu_kernels, refuse_slow_kernels
from layertap.spec import DTypeName, ExtractionSpec
from layertap.target_info import (
    Source,
    TargetInfo,
    describe,
    drafter_layer_ids,
    find_backbone,
    inspect_target,
    load_config,
    num_executed_layers,
    resolve_source,
)

__all__ = ["Target", "TargetInfo", "compare_canary", "drafter_layer_ids", "inspect_target"]

TORCH_DTYPE: Mapping[DTypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

CONVENTION_TOLERANCE: Mapping[DTypeName, float] = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Median relative error of a token's state against Hugging Face's own, where both ran in the same shapes."""

NOISE_TOLERANCE: Mapping[DTypeName, float] = {"bfloat16": 1e-1, "float16": 2e-2, "float32": 1e-3}
"""Median relative error of a token's state between runs of other shapes (alone and in a batch) or on other
devices: matrix products round differently there, and the depth of a target amplifies it."""

CHECK_LENGTHS = (150, 37, 9, 1)
"""Tokens of the rows of the self-check; the first one is longer than two chunks of a delta rule (64), so that
what these hand on counts."""

CANARY_LENGTH = 64

TUNING_SHAPE = (16, 256)
"""Rows and tokens of the first batch on a GPU. Triton's kernels are tuned by the first batch they see and
keep what won: the check row alone would choose for 37 tokens what then runs for thousands, up to 3 times
slower."""

WARM_LENGTHS = (256, 15)
"""Tokens of the rows in the batches that compile: a multiple of 16 and none, for which other code is made."""

PACKAGES = ("torch", "transformers", "flash-linear-attention", "causal-conv1d", "safetensors")


class Target:
    """A language model on one device, cut down to what the extraction needs.

    The head and the layers above the last one stored are dropped. Use `load` for a checkpoint and
    `from_backbone` for a model that is in memory. Not thread-safe: one thread at a time may call it.
    """

    def __init__(self, model: nn.Module, *, info: TargetInfo, spec: ExtractionSpec) -> None:
        spec.check_against(info.num_hidden_layers)
        if info.hidden_size * spec.item_bytes % 4:
            raise TargetError(
                f"hidden size {info.hidden_size} in {spec.dtype} is no multiple of 4 bytes, which the file "
                "layout needs: extract in float32"
            )
        self.info = info
        self.spec = spec
        self._backbone = find_backbone(model)
        self.device = _only_device(self._backbone.module)
        refuse_gpu_kernels(self._backbone.layers, self.device)
        self._backbone.module.eval().requires_grad_(False)
        self._norm = self._backbone.norm
        self._taken: dict[int, Tensor] = {}
        self._is_compiled = False
        self._tune()
        self._check_ids_BT = _token_row(info.vocab_size, CHECK_LENGTHS[0])[None].to(self.device)
        self._reference = self._plain_states()
        self._truncate()
        self._hook()

    @classmethod
    def load(
        cls, source: str, *, spec: ExtractionSpec, revision: str | None = None, device: str | torch.device
    ) -> Self:
        """Load a checkpoint whole onto one device, in the dtype of the spec.

        Args:
            source: a hub id or a folder.
            spec: what is extracted; its `target_identity` must be that of the source.
            revision: branch, tag or commit on the hub.
            device: `cpu`, `cuda` or `cuda:<index>`.

        Raises:
            TargetError: the source is another target than the spec's, lacks weights, changes meanwhile,
                doesn't fit the device, or can't be tapped.
            SpecError: the target has no such layers.
        """
        return cls.load_with_head(source, spec=spec, revision=revision, device=device)[0]

    @classmethod
    def load_with_head(
        cls, source: str, *, spec: ExtractionSpec, revision: str | None = None, device: str | torch.device
    ) -> tuple[Self, nn.Module]:
        """As `load`, with the head besides, which makes logits of normed last hidden states."""
        found = resolve_source(source, revision)
        if found.identity != spec.target_identity:
            raise TargetError(
                f"target {source!r} is {found.identity}, but the extraction was made for "
                f"{spec.target_identity}: give the same files or revision here, or extract into another root"
            )
        device = torch.device(device)
        if device.type == "cpu":
            keep_gpu_kernels_out()
        else:
            use_caches(device)
        model, config = _load_model(found, spec, device)
        found.check_unchanged()
        head: nn.Module = model.get_output_embeddings()
        return cls(model, info=describe(model, config, source=source, found=found), spec=spec), head

    @classmethod
    def from_backbone(cls, model: Any, *, spec: ExtractionSpec) -> Self:
        """Take a Hugging Face model that is in memory, with or without its head, on the device it is on.

        The model is cut down in place. Its identity is taken from the spec and can't be checked.

        Raises:
            TargetError, SpecError: as `load`.
        """
        found = Source(path="in memory", revision=None, identity=spec.target_identity)
        return cls(model, info=describe(model, model.config, source=found.path, found=found), spec=spec)

    @torch.inference_mode()
    def tap(self, ids_BT: Tensor) -> list[Tensor]:
        """One forward pass over right-padded rows.

        Args:
            ids_BT: token ids, int32 or int64, on the target's device; the ids at padding don't matter.

        Returns:
            [B, T, H] in the spec's dtype for each layer id, ascending, then the last hidden state if it is
            stored (normed for `post_norm`). At padding the values mean nothing.

        Raises:
            TargetError: a layer gives something else than [B, T, H] in the spec's dtype.
        """
        if self._is_compiled:
            allow_variants()
            if ids_BT.shape[1] == 1:  # one token would be compiled as a case of its own
                return [state[:, :1] for state in self.tap(functional.pad(ids_BT, (0, 1)))]
        try:
            self._backbone.module(input_ids=ids_BT.long(), use_cache=False)
            states = [self._taken[k] for k in self.spec.layer_ids]
            if self.spec.stores_last:
                last_BTH = self._taken[self.info.num_hidden_layers - 1]
                states.append(
                    self._norm(last_BTH) if self.spec.last_hidden_state == "post_norm" else last_BTH
                )
            return states
        finally:
            self._taken.clear()

    @torch.inference_mode()
    def normed(self, last_TH: Tensor) -> Tensor:
        """A stored `last_hidden_state` after the final norm: what the head takes."""
        return last_TH if self.spec.last_hidden_state == "post_norm" else self._norm(last_TH)

    def compile(self, *, max_batch_tokens: int) -> None:
        """Compile the decoder layers and run batches that make the compiler see all it needs to.

        `self_check` then compares what is compiled with what Hugging Face gave before.

        Args:
            max_batch_tokens: tokens of the largest batch to come, padding included.

        Raises:
            TargetError: the layers can't be compiled.
        """
        shapes = [(max(2, max_batch_tokens // length), length) for length in WARM_LENGTHS]
        try:
            compile_layers(self._backbone.layers)
            self._is_compiled = True
            for shape in [*shapes, (1, WARM_LENGTHS[0])]:
                self.tap(torch.zeros(shape, dtype=torch.int32, device=self.device))
        except torch._dynamo.exc.TorchDynamoException as error:
            raise TargetError(
                f"the layers of {self.info.model_type} can't be compiled: run with `compiled` off. {error}"
            ) from error

    def refuse_slow_kernels(self) -> None:
        """Refuse transformers' reference code where a kernel for this GPU exists.

        Raises:
            TargetError: names the function and the package that has the kernel.
        """
        refuse_slow_kernels(self._backbone.layers, self.device)

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, H] the input embedding's weight, on the target's device."""
        embeddings: Any = self._backbone.module.get_input_embeddings()  # type: ignore[operator]
        weight: Tensor = embeddings.weight
        return weight

    @property
    def final_norm(self) -> nn.Module:
        """The target's own final norm."""
        return self._norm

    @property
    def state_names(self) -> list[str]:
        """Names of what `tap` returns, in its order: `layer_3`, …, `last_hidden_state`."""
        names = [f"layer_{k}" for k in self.spec.layer_ids]
        return [*names, "last_hidden_state"] if self.spec.stores_last else names

    def self_check(self) -> dict[str, Any]:
        """Check that taps follow the convention and that padding changes nothing.

        Returns:
            The largest errors and their tolerances, by check and state.

        Raises:
            SelfCheckError: a state differs from Hugging Face's own, depends on the rows beside it, or isn't
                finite; says which, and by how much.
        """
        dtype = self.spec.dtype
        convention = {name: relative_error(a, b) for name, a, b in self._against_reference()}
        tolerance = (NOISE_TOLERANCE if self._is_compiled else CONVENTION_TOLERANCE)[dtype]
        _refuse_above(convention, tolerance, "differs from Hugging Face's own states")
        padding = self._padding_errors()
        _refuse_above(padding, NOISE_TOLERANCE[dtype], "of a row depends on the padded rows beside it")
        return {
            "convention": {"errors": convention, "tolerance": tolerance},
            "padding": {"errors": padding, "tolerance": NOISE_TOLERANCE[dtype]},
        }

    def canary_states(self) -> dict[str, Tensor]:
        """States of one fixed token row, to compare lanes; on the CPU.

        Returns:
            `input_ids` [T] int32, and [T, H] for each of `state_names`.
        """
        ids_T = _token_row(self.info.vocab_size, CANARY_LENGTH)
        states = self.tap(ids_T[None].to(self.device))
        named = {n: s[0].to("cpu", copy=True) for n, s in zip(self.state_names, states, strict=True)}
        return {"input_ids": ids_T, **named}

    def environment(self) -> dict[str, Any]:
        """What the states were computed with, compiled or not, and by which kernels, as JSON values."""
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = "not installed"
        return {
            "versions": versions,
            "device": _device_details(self.device),
            "dtype": self.spec.dtype,
            "quantization": self.info.quantization,
            "attention": getattr(self._backbone.module.config, "_attn_implementation", None),
            "compiled": self._is_compiled,
            "kernels": kernels_in_use(self._backbone.layers),
        }

    @torch.inference_mode()
    def _tune(self) -> None:
        if self.device.type == "cuda":
            # cuDNN's attention is planned anew for each shape, 50 ms and more; a plan has thousands of shapes
            torch.backends.cuda.enable_cudnn_sdp(False)
            # lanes that start together tune beside one another: none has to wait for another's GPU
            self._backbone.module(input_ids=torch.zeros(TUNING_SHAPE, dtype=torch.int64, device=self.device))

    @torch.inference_mode()
    def _plain_states(self) -> list[Tensor]:
        """The stored states of the check row as Hugging Face gives them, before anything is cut or hooked.

        Its tuple holds the last layer after the final norm only, so that one is compared in its normed form.
        """
        ids_BT = self._check_ids_BT.long()
        out = self._backbone.module(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        num_layers = self.info.num_hidden_layers
        if out.hidden_states is None or len(out.hidden_states) != num_layers + 1:
            raise TargetError(f"{self.info.model_type} doesn't give the states of its {num_layers} layers")
        states = [*out.hidden_states[:-1], out.last_hidden_state]
        stored = [states[k + 1] for k in self.spec.layer_ids]
        return [*stored, states[-1]] if self.spec.stores_last else stored

    def _against_reference(self) -> list[tuple[str, Tensor, Tensor]]:
        taps = self.tap(self._check_ids_BT)
        with torch.inference_mode():
            for i, name in enumerate(self.state_names):
                is_raw_last = name == f"layer_{self.info.num_hidden_layers - 1}" or (
                    name == "last_hidden_state" and self.spec.last_hidden_state == "pre_norm"
                )
                if is_raw_last:
                    taps[i] = self._norm(taps[i])
        return list(zip(self.state_names, taps, self._reference, strict=True))

    def _padding_errors(self) -> dict[str, float]:
        """By state, the error of the worst row of a padded batch against the row alone."""
        rows = [_token_row(self.info.vocab_size, n, start=i) for i, n in enumerate(CHECK_LENGTHS)]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        together = self.tap(padded.to(self.device))
        worst = dict.fromkeys(self.state_names, 0.0)
        for row, ids_T in enumerate(rows):
            alone = self.tap(ids_T[None].to(self.device))
            for name, batch_BTH, alone_1TH in zip(self.state_names, together, alone, strict=True):
                worst[name] = _max_or_nan(
                    worst[name], relative_error(batch_BTH[row, : len(ids_T)], alone_1TH[0])
                )
        return worst

    def _truncate(self) -> None:
        """Drop the layers above the last one needed and the final norm, which `tap` applies itself."""
        module: Any = self._backbone.module
        num_layers = num_executed_layers(self.spec, self.info.num_hidden_layers)
        setattr(module, self._backbone.layers_name, self._backbone.layers[:num_layers])
        setattr(module, self._backbone.norm_name, nn.Identity())
        if getattr(module.config, "layer_types", None):
            module.config.layer_types = module.config.layer_types[:num_layers]
        module.config.num_hidden_layers = num_layers

    def _hook(self) -> None:
        needed = set(self.spec.layer_ids)
        if self.spec.stores_last:
            needed.add(self.info.num_hidden_layers - 1)
        for k in needed:
            self._backbone.layers[k].register_forward_hook(lambda _m, _a, out, k=k: self._take(k, out))

    def _take(self, layer_id: int, out: Any) -> None:
        state = out[0] if isinstance(out, tuple) else out
        shape = (state.dim(), state.shape[-1]) if isinstance(state, Tensor) else type(out).__name__
        if shape != (3, self.info.hidden_size):
            found = list(state.shape) if isinstance(state, Tensor) else shape
            raise TargetError(
                f"decoder layer {layer_id} gives {found}, not [B, T, {self.info.hidden_size}]: "
                f"{self.info.model_type} can't be tapped"
            )
        if state.dtype != TORCH_DTYPE[self.spec.dtype]:
            raise TargetError(
                f"decoder layer {layer_id} computes in {state.dtype}, not in {self.spec.dtype} as asked: "
                "choose the dtype in which this target runs"
            )
        self._taken[layer_id] = state


def compare_canary(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Check that this lane computes what the root's first lane did.

    Raises:
        SelfCheckError: the canary rows are not the same, or a state differs by more than the noise of another
            device; says which, and by how much.
    """
    if sorted(mine) != sorted(theirs) or not torch.equal(mine["input_ids"], theirs["input_ids"]):
        raise SelfCheckError(
            f"the canary of this root holds {sorted(theirs)} of {len(theirs['input_ids'])} tokens, this lane "
            f"computes {sorted(mine)} of {len(mine['input_ids'])}: they are not of one extraction"
        )
    names = [name for name in mine if name != "input_ids"]
    for name in names:
        if mine[name].shape != theirs[name].shape or mine[name].dtype != theirs[name].dtype:
            raise SelfCheckError(
                f"{name} of the canary is {list(theirs[name].shape)} {theirs[name].dtype}, on this lane "
                f"{list(mine[name].shape)} {mine[name].dtype}"
            )
    dtype = next(n for n, dtype in TORCH_DTYPE.items() if dtype == mine[names[0]].dtype)
    errors = {name: relative_error(mine[name], theirs[name]) for name in names}
    _refuse_above(errors, NOISE_TOLERANCE[dtype], "differs from the canary of the root's first lane")


def _max_or_nan(a: float, b: float) -> float:
    """The larger one; NaN wins, where `max` would depend on the order."""
    return a if a != a or a > b else b


def relative_error(a_TH: Tensor, b_TH: Tensor) -> float:
    """Median over tokens of the relative error of `a` against `b`; NaN where either isn't finite."""
    a, b = a_TH.float(), b_TH.to(a_TH.device).float()
    if not (a.isfinite().all() and b.isfinite().all()):
        return float("nan")
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).median())


def _refuse_above(errors: Mapping[str, float], tolerance: float, what: str) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        listed = ", ".join(
            f"{name}: not finite" if error != error else f"{name}: {error:.1e}"
            for name, error in wrong.items()
        )
        raise SelfCheckError(
            f"what the target computes {what} (median relative error above {tolerance:g}): {listed}"
        )


def _token_row(vocab_size: int, length: int, start: int = 0) -> Tensor:
    """A fixed row of varied token ids, [length] int32."""
    steps = torch.arange(start, start + length, dtype=torch.int64)
    return ((steps * 7919 + steps * steps * 31 + 11) % vocab_size).int()


def _only_device(module: nn.Module) -> torch.device:
    """The device all weights are on."""
    sizes: dict[torch.device, int] = {}
    for parameter in module.parameters():
        sizes[parameter.device] = (
            sizes.get(parameter.device, 0) + parameter.numel() * parameter.element_size()
        )
    if len(sizes) != 1 or next(iter(sizes)).type == "meta":
        listed = ", ".join(f"{size / 2**30:.2f} GiB on {device}" for device, size in sizes.items())
        raise TargetError(
            f"the target must lie whole on one device, but it has {listed}: free memory or take a larger GPU"
        )
    return next(iter(sizes))


def _load_model(found: Source, spec: ExtractionSpec, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    config = load_config(found)
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            found.path,
            revision=found.revision,
            config=config,
            dtype=TORCH_DTYPE[spec.dtype],
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placement,
        )
    except torch.OutOfMemoryError as error:
        raise TargetError(f"target {found.path!r} doesn't fit {device} in {spec.dtype}: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        raise TargetError(f"target {found.path!r} can't be loaded: {error}") from error
    model, loading = loaded
    _refuse_missing(model, loading["missing_keys"], found.path)
    return model, config


def _refuse_missing(model: nn.Module, missing_keys: Sequence[str], path: str) -> None:
    """Transformers fills missing weights at random with a mere warning; only the head may be missing."""
    backbone = find_backbone(model).module
    prefix = next(name for name, module in model.named_modules() if module is backbone)
    missing = sorted(key for key in missing_keys if key.startswith(prefix))
    if missing:
        listed = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        raise TargetError(f"target {path!r} lacks {len(missing)} weights ({listed}): complete the checkpoint")


def _device_details(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "type": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "type": device.type, "uuid": str(properties.uuid)}
