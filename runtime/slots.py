"""What the runtime knows of a parameter: its slot, its shape, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lohan_fx.runtime.host_pool import page_padded_bytes

STATE_DTYPE = torch.float32


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter of the model; tied ones are one slot.

    A trainable parameter has an fp32 master and two fp32 moments; a frozen one has only its value, kept as the
    model brought it. ``compute_dtype`` is what the graph sees. Where it equals the master's dtype the two are one.
    """

    slot: int
    name: str
    shape: torch.Size
    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    trainable: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def compute_bytes(self) -> int:
        return self.numel * self.compute_dtype.itemsize

    @property
    def is_master(self) -> bool:
        """Whether what the graph sees is the master itself."""
        return self.compute_dtype == self.master_dtype

    @property
    def master_extent(self) -> str:
        return f"{self.name}:master"

    @property
    def moments_extent(self) -> str:
        return f"{self.name}:moments"

    @property
    def gradient_extent(self) -> str:
        return f"{self.name}:gradient"

    @property
    def streamed_extent(self) -> str:
        """What ``fetch`` reads."""
        return self.master_extent if self.is_master else f"{self.name}:compute"

    def extents(self, chunk_elements: int) -> dict[str, int]:
        """Name -> bytes of what this slot needs in the store."""
        found = {self.master_extent: self.numel * self.master_dtype.itemsize}
        if not self.is_master:
            found[self.streamed_extent] = self.compute_bytes
        if self.trainable:
            found[self.moments_extent] = sum(2 * c.padded_bytes for c in self.chunks(chunk_elements))
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def chunk_bytes(self, chunk_elements: int) -> dict[str, int]:
        """Name -> bytes that the optimizer writes at once, of the extents above: the unit that checkpoints keep."""
        sizes = {
            self.master_extent: chunk_elements * self.master_dtype.itemsize,
            self.streamed_extent: chunk_elements
            * (self.master_dtype if self.is_master else self.compute_dtype).itemsize,
            self.moments_extent: 2 * page_padded_bytes(chunk_elements * STATE_DTYPE.itemsize),
        }
        return {name: page_padded_bytes(nbytes) for name, nbytes in sizes.items()}

    def chunks(self, chunk_elements: int) -> list[Chunk]:
        """The parameter cut into pieces of ``chunk_elements``, the last one shorter."""
        starts = range(0, self.numel, chunk_elements)
        return [Chunk(self, start, min(chunk_elements, self.numel - start)) for start in starts]


@dataclass(frozen=True)
class Chunk:
    """``elements`` elements of a parameter from ``start``: the optimizer's unit of read, update and write."""

    parameter: ParameterSlot
    start: int
    elements: int

    @property
    def padded_bytes(self) -> int:
        """Bytes of one fp32 array of the chunk, in whole pages."""
        return page_padded_bytes(self.elements * STATE_DTYPE.itemsize)

    @property
    def master_offset(self) -> int:
        return self.start * self.parameter.master_dtype.itemsize

    @property
    def moments_offset(self) -> int:
        """First moment here, second moment ``padded_bytes`` later: one read and one write for both."""
        return 2 * self.start * STATE_DTYPE.itemsize

    @property
    def streamed_offset(self) -> int:
        return self.start * self.parameter.compute_dtype.itemsize

    def gradient_offset(self, dtype: torch.dtype) -> int:
        """Where the chunk of a gradient that is held as ``dtype`` begins in its extent."""
        return self.start * dtype.itemsize


@dataclass(eq=False)
class Held:
    """A gradient that waits for the end of its step: a fp32 sum or, where it is the step's only one, as it arrived.

    ``memory`` is flat and of ``dtype``; None: the slot's gradient extent. ``norms``: 2-norms of the pieces of what is held
    now, by the piece's first element; empty where nobody has measured. ``factors``: what the gradient is multiplied by
    before it is applied, in this order; ``memory`` itself is never changed by them. ``borrowed``: ``memory`` is what the
    graph returned, which may be the gradient of another parameter too (of ``a + b``).
    """

    dtype: torch.dtype
    memory: torch.Tensor | None = None
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    factors: list[torch.Tensor] = field(default_factory=list)
    borrowed: bool = False


@dataclass
class Residency:
    """What of a parameter lives in memory at the moment; None means NVMe.

    Flat tensors. ``compute`` is the compute-dtype copy, on the device or (``on_device`` False) in host RAM; ``master``,
    ``exp_avg`` and ``exp_avg_sq`` are the states, in host RAM or on the device. ``contributions`` gradients are ``held`` for
    the step that is under way.
    ``updates`` counts the optimizer's steps on this parameter.
    """

    compute: torch.Tensor | None = None
    on_device: bool = False
    master: torch.Tensor | None = None
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    held: Held | None = None
    contributions: int = 0
    updates: int = 0
