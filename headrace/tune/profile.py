"""The profile that `headrace tune` keeps: a device's queue depth and service times for one model (docs/prefill.md).

It lies beside a store's files, or, for other checkpoints and for a store that cannot be written to, under
$XDG_CACHE_HOME/headrace/profiles. Its name says what it holds for: model, processor, threads and file system.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core, machine
from headrace.errors import HeadraceError
from headrace.experts.pipeline import MAX_QUEUE_DEPTH
from headrace.experts.source import expert_source
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.header import read_small
from headrace.formats.safetensors import parse_json
from headrace.models.fields import Fields
from headrace.tune.request import ModelShape
from headrace.tune.service_times import ComputeTimes, NonExpertTimes, ReadTimes, ServiceTimes

FORMAT, FORMAT_VERSION = "headrace-profile", 2
MAX_PROFILE_BYTES = 1 << 20
MAX_ENTRIES = 256  # group sizes, bandwidths
# The checksum covers the bytes of the inner object, as in a store's manifest.
_WRAPPED = re.compile(rb'\{"crc32c": "([0-9a-f]{8})", "profile": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class Device:
    """What service times depend on besides the model."""

    cpu: str
    num_threads: int
    filesystem: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, num_threads: int | None) -> Device:
        """num_threads: None: what the engine would take."""
        largest = max(checkpoint.files, key=lambda file: file.stat().st_size)
        return cls(machine.cpu_name(), num_threads or machine.num_cpus(), machine.filesystem_of(largest))


@dataclass(frozen=True)
class Bandwidth:
    """Of grouped reads, with so many in flight: the median of several measurements."""

    group_size: int
    queue_depth: int
    bytes_per_s: float


@dataclass(frozen=True)
class Profile:
    model: str  # its name, for people
    fingerprint: str
    device: Device
    queue_depth: int  # Q, by equation 7
    bandwidths: tuple[Bandwidth, ...]
    times: ServiceTimes
    group_sizes: tuple[int, ...]  # that passes were measured with, ascending
    calibration_tokens: int

    def depth_factor(self, group_size: int, queue_depth: int) -> float:
        """How much longer a read takes with so many in flight than with the profile's Q; 1 if not measured."""
        measured = {b.queue_depth: b.bytes_per_s for b in self.bandwidths if b.group_size == group_size}
        if queue_depth not in measured or self.queue_depth not in measured:
            return 1.0
        return queue_depth / measured[queue_depth] / (self.queue_depth / measured[self.queue_depth])


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    source = expert_source(checkpoint)
    layers = range(len(checkpoint.experts))
    return ModelShape(
        tuple(layer.num_experts for layer in checkpoint.experts), tuple(source.record_bytes(i) for i in layers)
    )


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Of what times depend on: shapes, types, layout and files; not of the weights' values."""
    digest = hashlib.sha256()
    digest.update(repr([(file.name, file.stat().st_size) for file in checkpoint.files]).encode())
    layers = [(e.parts, e.num_experts, e.crc32c is not None) for e in checkpoint.experts]
    trunk = sorted((name, int(t.dtype), t.shape) for name, t in checkpoint.tensors.items())
    digest.update(repr([layers, trunk, checkpoint.config.num_experts_per_tok]).encode())
    return digest.hexdigest()[:16]


# ---- where it lies


def profile_paths(checkpoint: Checkpoint, device: Device) -> list[Path]:
    """Where a profile may lie, the place that is preferred first."""
    text = json.dumps([fingerprint_of(checkpoint), asdict(device)])
    name = f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "profiles" / name
    return [checkpoint.path / name, cache] if checkpoint.kind == "store" else [cache]


def check_place(checkpoint: Checkpoint, num_threads: int | None) -> None:
    """Before anything is measured: HeadraceError if a profile could be kept nowhere."""
    refused = ""
    for path in profile_paths(checkpoint, Device.of(checkpoint, num_threads)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refused = f"{path.parent}: {error.strerror}"
            continue
        if os.access(path.parent, os.W_OK) and not path.is_dir():
            return
        refused = f"{path}: cannot be written"
    raise HeadraceError(f"{refused}; the profile needs a place: set XDG_CACHE_HOME to a directory that can be written")


def save_profile(profile: Profile, checkpoint: Checkpoint) -> Path:
    """Writes it whole or not at all, at the first place that can be written to."""
    body = json.dumps(_to_json(profile), separators=(",", ":")).encode()
    data = b'{"crc32c": "%08x", "profile": %s}\n' % (_core.crc32c(body, 0), body)
    *rest, last = profile_paths(checkpoint, profile.device)
    for path in rest:
        try:
            return _write(path, data)
        except PermissionError:
            continue
        except OSError as e:
            if e.errno != errno.EROFS:
                raise
    last.parent.mkdir(parents=True, exist_ok=True)
    return _write(last, data)


def _write(path: Path, data: bytes) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def find_profile(
    checkpoint: Checkpoint, num_threads: int | None, warn: Callable[[str], None] = lambda text: None
) -> Profile | None:
    """The profile for this model here; None without one. One that cannot be used is told to `warn`, and passed over."""
    found = locate_profile(checkpoint, num_threads, warn)
    return found[1] if found else None


def locate_profile(
    checkpoint: Checkpoint, num_threads: int | None, warn: Callable[[str], None] = lambda text: None
) -> tuple[Path, Profile] | None:
    """find_profile()'s, and where it lies."""
    device = Device.of(checkpoint, num_threads)
    for path in profile_paths(checkpoint, device):
        if os.path.lexists(path):
            try:
                return path, load_profile(path, checkpoint, device)
            except HeadraceError as error:
                warn(f"{error}; running without it")
    return None


# ---- what it says


def load_profile(path: Path, checkpoint: Checkpoint, device: Device) -> Profile:
    """Raises HeadraceError for a file that is damaged, foreign, or for something else."""
    data = read_small(path, MAX_PROFILE_BYTES)
    wrapped = _WRAPPED.fullmatch(data)
    if not wrapped:
        raise HeadraceError(f"{path}: not a profile, or damaged; remove it, or run `headrace tune` again")
    expected, found = int(wrapped[1], 16), _core.crc32c(wrapped[2], 0)
    if found != expected:
        raise HeadraceError(
            f"{path}: damaged: expected checksum {expected:08x}, found {found:08x}; run `headrace tune` again"
        )
    fields = Fields(parse_json(wrapped[2], str(path)), str(path))
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    if fields.integer("format_version", low=0) != FORMAT_VERSION:
        raise fields.wrong("format_version", f"{FORMAT_VERSION}; run `headrace tune` again")
    profile = _from_json(fields, shape_of(checkpoint))
    if profile.fingerprint != fingerprint_of(checkpoint):
        raise fields.wrong("fingerprint", f"this model's, {fingerprint_of(checkpoint)}; run `headrace tune` again")
    if profile.device != device:
        raise fields.wrong("device", f"this one, {asdict(device)}; run `headrace tune` again")
    return profile


def _to_json(p: Profile) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": p.model,
        "fingerprint": p.fingerprint,
        "device": asdict(p.device),
        "queue_depth": p.queue_depth,
        "bandwidths": [asdict(b) for b in p.bandwidths],
        "read": asdict(p.times.read),
        "compute": asdict(p.times.compute),
        "non_expert": asdict(p.times.non_expert),
        "layer_factors": list(p.times.layer_factors),
        "shares": np.round(p.times.shares, 6).tolist(),
        "group_sizes": list(p.group_sizes),
        "calibration_tokens": p.calibration_tokens,
    }


def _from_json(fields: Fields, shape: ModelShape) -> Profile:
    device, layers = fields.fields("device"), len(shape.num_experts)
    factors = _numbers(fields, "layer_factors", fields.items("layer_factors"), layers, high=1e6)
    if not all(factors):
        raise fields.wrong("layer_factors", "numbers above 0")
    shares = fields.items("shares")
    if len(shares) != layers or any(type(row) is not list for row in shares):
        raise fields.wrong("shares", f"a list for each of {layers} layers")
    return Profile(
        model=fields.text("model"),
        fingerprint=fields.text("fingerprint"),
        device=Device(device.text("cpu"), device.integer("num_threads"), device.text("filesystem")),
        queue_depth=fields.integer("queue_depth", high=MAX_QUEUE_DEPTH),
        bandwidths=tuple(
            Bandwidth(
                _group_size(b, shape),
                b.integer("queue_depth", high=MAX_QUEUE_DEPTH),
                b.positive("bytes_per_s"),
            )
            for b in _objects(fields, "bandwidths")
        ),
        times=ServiceTimes(
            _times(fields, "read", ReadTimes),
            _times(fields, "compute", ComputeTimes),
            _times(fields, "non_expert", NonExpertTimes),
            tuple(factors),
            np.array([_numbers(fields, "shares", row, shape.num_experts[i], high=1.0) for i, row in enumerate(shares)]),
        ),
        group_sizes=_group_sizes(fields, shape),
        calibration_tokens=fields.integer("calibration_tokens"),
    )


def _objects(fields: Fields, key: str) -> list[Fields]:
    items = fields.items(key)
    if len(items) > MAX_ENTRIES or any(type(item) is not dict for item in items):
        raise fields.wrong(key, f"a list of at most {MAX_ENTRIES} objects")
    return [Fields(item, f"{fields.where}: {key}[{i}]") for i, item in enumerate(items)]


def _group_size(fields: Fields, shape: ModelShape) -> int:
    return fields.integer("group_size", high=max(shape.num_experts))


def _group_sizes(fields: Fields, shape: ModelShape) -> tuple[int, ...]:
    sizes, most = fields.items("group_sizes"), max(shape.num_experts)
    is_count = all(type(g) is int and 1 <= g <= most for g in sizes)
    if not is_count or not 1 <= len(sizes) <= MAX_ENTRIES or sizes != sorted(set(sizes)):
        raise fields.wrong("group_sizes", f"numbers from 1 to {most}, ascending")
    return tuple(sizes)


def _times(fields: Fields, key: str, kind: Any) -> Any:
    """A dataclass of seconds."""
    inner = fields.fields(key)
    for name in kind.__dataclass_fields__:
        if not 0 <= inner.number(name) < 1e6:
            raise inner.wrong(name, "a time from 0 to 1e6 s")
    return kind(*(inner.number(name) for name in kind.__dataclass_fields__))


def _numbers(fields: Fields, key: str, values: list[Any], count: int, high: float) -> list[float]:
    """Values from 0 to high. What JSON calls NaN or Infinity is not among them."""
    if len(values) != count or not all(type(v) in (int, float) and 0 <= v <= high for v in values):
        raise fields.wrong(key, f"{count} numbers from 0 to {high:g}")
    return [float(v) for v in values]
