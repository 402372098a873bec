"""model_presets: models by name, as dimensions: those of the papers, and well-known ones by their public configs.

``L-``, ``F-``, ``S-`` with a number: an id of the papers' claims (LoHan, Fuyou, LSP-Offload). The papers' GPTs have
GPT-3's shape: vocabulary 50257, two-thousand positions (sequences in the papers: 1024), embeddings tied.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from lohan_fx.models.model_families import Family, ModelDims, build

__all__ = ["MODELS", "Family", "ModelDims", "build", "named"]

_HUB = "config.json of {} on the Hugging Face hub"


def _gpt(family: Family, source: str, vocab: int, positions: int, rows: str) -> Iterator[ModelDims]:
    """Lines of name, layers, hidden, heads; an own source after ``#``."""
    for name, layers, hidden, heads, own in _rows(rows):
        yield ModelDims(
            name,
            family,
            layers,
            hidden,
            heads,
            own or source,
            vocab=vocab,
            positions=positions,
            tied=family != "gpt_neox",
        )


def _gated(
    family: Family, hub: str, vocab: int, positions: int, rows: str, *, tied: bool = False
) -> Iterator[ModelDims]:
    """Lines of name, layers, hidden, heads, key-value heads, head width, MLP width; the hub's name after ``#``."""
    for name, layers, hidden, heads, kv_heads, head_dim, ffn, own in _rows(rows):
        yield ModelDims(
            name,
            family,
            layers,
            hidden,
            heads,
            _HUB.format(own or hub),
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            positions=positions,
            tied=tied,
        )


def _dit(rows: str) -> Iterator[ModelDims]:
    """Lines of name, layers, hidden, heads, pixels of a side."""
    for name, layers, hidden, heads, image, own in _rows(rows):
        source = own or "L-MC-03, architecture of DiT-XL/2 (Peebles and Xie 2023)"
        yield ModelDims(name, Family.DIT, layers, hidden, heads, source, image=image, patch=2, classes=1000)


def _rows(rows: str) -> Iterator[tuple]:  # type: ignore[type-arg]
    for line in rows.strip().splitlines():
        numbers, _, source = line.partition("#")
        name, *values = numbers.split()
        yield (name, *map(int, values), source.strip())


_ALL: tuple[ModelDims, ...] = (
    *_gpt(
        Family.GPT2,
        "L-MC-01",
        50257,
        2048,
        """
        gpt3-6b    28  4096  32
        gpt3-13b   40  5120  40 # L-MC-01, F-MC-01
        gpt3-30b   48  7168  56
        gpt3-33b   60  6656  52 # F-MC-01
        gpt3-65b   80  8192  64 # F-MC-01
        gpt3-70b   80  8192  64 # L-MC-01: the shape of Fuyou's 65B
        gpt3-135b  88 11264  88 # L-MC-01, F-MC-01
        gpt3-175b  96 12288  96 # L-MC-01, F-MC-01
        gpt3-276b 112 14336 112 # L-MC-01, F-MC-01
        gpt3-412b 128 16384 128 # L-MC-01, F-MC-01
        gpt3-805b 160 20480 160 # F-MC-01
        """,
    ),
    *_dit(
        """
        dit-0.67b 28 1152 16 512
        dit-0.9b  30 1280 16 512
        dit-1.4b  32 1536 16 512
        dit-10b   28 4096 32 512
        dit-20b   40 5120 40 512
        dit-40b   48 7168 56 512
        dit-s-2   12  384  6 256 # Peebles and Xie 2023, table 1
        dit-b-2   12  768 12 256 # Peebles and Xie 2023, table 1
        dit-l-2   24 1024 16 256 # Peebles and Xie 2023, table 1
        dit-xl-2  28 1152 16 256 # Peebles and Xie 2023, table 1
        """
    ),
    *_gpt(
        Family.GPT2,
        "Radford et al. 2019, table 2",
        50257,
        1024,
        """
        gpt2        12  768 12
        gpt2-medium 24 1024 16
        gpt2-large  36 1280 20 # Radford et al. 2019, table 2; the GPT2-774M of S-HP-02
        gpt2-xl     48 1600 25
        gpt2-1.3b   40 1600 25 # S-TB-05 gives 40 layers; width and heads are those of gpt2-xl, which makes 1.31e9 (estimate)
        """,
    ),
    *_gpt(
        Family.OPT,
        "Zhang et al. 2022, table 1",
        50272,
        2048,
        """
        opt-125m 12   768 12
        opt-1.3b 24  2048 32
        opt-2.7b 32  2560 32
        opt-6.7b 32  4096 32
        opt-13b  40  5120 40
        opt-30b  48  7168 56
        opt-66b  64  9216 72
        opt-175b 96 12288 96
        """,
    ),
    *_gpt(Family.GPT_NEOX, _HUB.format("EleutherAI/pythia-1.4b"), 50304, 2048, "pythia-1.4b 24 2048 16"),
    *_gpt(Family.GPT_NEOX, _HUB.format("EleutherAI/pythia-6.9b"), 50432, 2048, "pythia-6.9b 32 4096 32"),
    *_gpt(Family.GPT_NEOX, _HUB.format("EleutherAI/pythia-12b"), 50688, 2048, "pythia-12b 36 5120 40"),
    *_gpt(Family.GPT_NEOX, _HUB.format("EleutherAI/gpt-neox-20b"), 50432, 2048, "gpt-neox-20b 44 6144 64"),
    *_gpt(Family.ROBERTA, _HUB.format("FacebookAI/roberta-base") + "; S-TB-03", 50265, 512, "roberta-base 12 768 12"),
    *_gated(
        Family.LLAMA,
        "",
        32000,
        4096,
        """
        llama-7b    32 4096 32 32 128 11008 # huggyllama/llama-7b (here for 4096 positions); S-TB-01
        llama-13b   40 5120 40 40 128 13824 # huggyllama/llama-13b (here for 4096 positions)
        llama-2-7b  32 4096 32 32 128 11008 # meta-llama/Llama-2-7b-hf
        llama-2-13b 40 5120 40 40 128 13824 # meta-llama/Llama-2-13b-hf
        llama-2-70b 80 8192 64  8 128 28672 # meta-llama/Llama-2-70b-hf
        open-llama-3b 26 3200 32 32 100 8640 # openlm-research/open_llama_3b (here for 4096 positions); S-HP-02's Llama-3B
        """,
    ),
    *_gated(
        Family.LLAMA,
        "",
        32256,
        16384,
        """
        deepseek-coder-1.3b 24 2048 16 16 128  5504 # deepseek-ai/deepseek-coder-1.3b-base; S-HP-03
        deepseek-coder-6.7b 32 4096 32 32 128 11008 # deepseek-ai/deepseek-coder-6.7b-base; S-HP-03
        """,
    ),
    *_gated(
        Family.LLAMA,
        "",
        128256,
        131072,
        """
        llama-3-8b     32  4096  32 8 128 14336 # meta-llama/Meta-Llama-3-8B (here for 131072 positions)
        llama-3-70b    80  8192  64 8 128 28672 # meta-llama/Meta-Llama-3-70B (here for 131072 positions)
        llama-3.1-8b   32  4096  32 8 128 14336 # meta-llama/Llama-3.1-8B
        llama-3.1-70b  80  8192  64 8 128 28672 # meta-llama/Llama-3.1-70B
        llama-3.1-405b 126 16384 128 8 128 53248 # meta-llama/Llama-3.1-405B
        llama-3.3-70b  80  8192  64 8 128 28672 # meta-llama/Llama-3.3-70B-Instruct
        """,
    ),
    *_gated(
        Family.LLAMA,
        "",
        128256,
        131072,
        """
        llama-3.2-1b 16 2048 32 8  64 8192 # meta-llama/Llama-3.2-1B
        llama-3.2-3b 28 3072 24 8 128 8192 # meta-llama/Llama-3.2-3B
        """,
        tied=True,
    ),
    *_gated(Family.MISTRAL, "mistralai/Mistral-7B-v0.3", 32768, 32768, "mistral-7b 32 4096 32 8 128 14336"),
    *_gated(
        Family.MISTRAL,
        "",
        32768,
        131072,
        "mistral-large-123b 88 12288 96 8 128 28672 # mistralai/Mistral-Large-Instruct-2407",
    ),
    *_gated(
        Family.MISTRAL,
        "",
        131072,
        32768,
        """
        mistral-nemo-12b  40 5120 32 8 128 14336 # mistralai/Mistral-Nemo-Base-2407
        mistral-small-24b 40 5120 32 8 128 32768 # mistralai/Mistral-Small-24B-Base-2501
        """,
    ),
    *_gated(
        Family.QWEN2,
        "",
        151936,
        32768,
        """
        qwen2.5-0.5b 24  896 14 2  64  4864 # Qwen/Qwen2.5-0.5B
        qwen2.5-1.5b 28 1536 12 2 128  8960 # Qwen/Qwen2.5-1.5B
        qwen2.5-3b   36 2048 16 2 128 11008 # Qwen/Qwen2.5-3B
        """,
        tied=True,
    ),
    *_gated(
        Family.QWEN2,
        "",
        152064,
        131072,
        """
        qwen2.5-7b  28 3584 28 4 128 18944 # Qwen/Qwen2.5-7B
        qwen2.5-14b 48 5120 40 8 128 13824 # Qwen/Qwen2.5-14B
        qwen2.5-32b 64 5120 40 8 128 27648 # Qwen/Qwen2.5-32B
        qwen2.5-72b 80 8192 64 8 128 29568 # Qwen/Qwen2.5-72B
        """,
    ),
    *_gated(
        Family.QWEN3,
        "",
        151936,
        32768,
        """
        qwen3-0.6b 28 1024 16 8 128 3072 # Qwen/Qwen3-0.6B-Base
        qwen3-1.7b 28 2048 16 8 128 6144 # Qwen/Qwen3-1.7B-Base
        qwen3-4b   36 2560 32 8 128 9728 # Qwen/Qwen3-4B-Base
        """,
        tied=True,
    ),
    *_gated(
        Family.QWEN3,
        "",
        151936,
        32768,
        """
        qwen3-8b  36 4096 32 8 128 12288 # Qwen/Qwen3-8B-Base
        qwen3-14b 40 5120 40 8 128 17408 # Qwen/Qwen3-14B-Base
        qwen3-32b 64 5120 64 8 128 25600 # Qwen/Qwen3-32B
        """,
    ),
    *_gated(
        Family.GEMMA,
        "",
        256000,
        8192,
        """
        gemma-2b 18 2048  8  1 256 16384 # google/gemma-2b
        gemma-7b 28 3072 16 16 256 24576 # google/gemma-7b
        """,
        tied=True,
    ),
    *_gated(
        Family.GEMMA2,
        "",
        256000,
        8192,
        """
        gemma-2-2b  26 2304  8  4 256  9216 # google/gemma-2-2b
        gemma-2-9b  42 3584 16  8 256 14336 # google/gemma-2-9b
        gemma-2-27b 46 4608 32 16 128 36864 # google/gemma-2-27b
        """,
        tied=True,
    ),
    *_gated(Family.PHI3, "microsoft/Phi-3-mini-4k-instruct", 32064, 4096, "phi-3-mini 32 3072 32 32 96 8192"),
    *_gated(Family.PHI3, "microsoft/phi-4", 100352, 16384, "phi-4 40 5120 40 10 128 17920"),
)

MODELS: Mapping[str, ModelDims] = {dims.name: dims for dims in _ALL}


def named(name: str) -> ModelDims:
    """The dimensions of the model called ``name``; ``ValueError`` names close ones."""
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    raise ValueError(f"no model preset {name!r}{hint} There are: {', '.join(MODELS)}")
