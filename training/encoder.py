"""Fine-tune all-MiniLM-L6-v2 for requests and tools: `python -m training.encoder MODEL PAIRS OUT`.

OUT receives the tuned weights, and `model.onnx` with weights of one byte. Needs torch, transformers, onnx, onnxruntime
and an accelerator.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

LENGTH = 128
TEMPERATURE = 0.05
# How much of the tuned weights the result has; the rest is the stock model's.
TUNED = 0.9
# The tuned weights are the mean of runs with these seeds.
SEEDS = (1, 2, 3)
RECIPE: dict[str, Any] = {
    "size": 1024, "epochs": 4, "rate": 1e-4, "repeat": {"bfcl": 4, "own": 5}, "near": {"guru", "own"},
}  # fmt: skip

Weights = dict[str, torch.Tensor]

Pair = tuple[str, str, str]  # request, text of the tool, source
Joined = tuple[str, str, str, str]  # the same, and the text of the tool of a second request


class Texts:
    """Texts as padded ids on the accelerator."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        cut = tokenizer.encode_batch(list(self.numbers), add_special_tokens=True)
        ids = torch.zeros((len(cut), LENGTH), dtype=torch.int32)
        for row, one in enumerate(cut):
            ids[row, : len(one.ids)] = torch.tensor(one.ids, dtype=torch.int32)
        self.ids = ids.cuda()
        self.lengths = torch.tensor([len(one.ids) for one in cut]).cuda()

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        longest = int(self.lengths[rows].max())
        ids = self.ids[rows, :longest].long()
        return ids, (torch.arange(longest, device="cuda")[None] < self.lengths[rows][:, None]).long()


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


def pooled(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mask = mask[..., None].to(hidden.dtype)
    return functional.normalize(((hidden * mask).sum(1) / mask.sum(1)).float(), dim=-1)


@torch.no_grad()
def encode(model: Any, texts: Texts, rows: torch.Tensor | None = None, size: int = 1024) -> torch.Tensor:
    model.eval()
    rows = torch.arange(len(texts.numbers), device="cuda") if rows is None else rows
    with torch.autocast("cuda", torch.bfloat16):
        return torch.cat([pooled(model, *texts.batch(some)) for some in rows.split(size)])


def read(path: str) -> list[Pair]:
    with gzip.open(path, "rt") as file:
        return [(request, text, source) for request, text, source in map(json.loads, file)]


def joined(pairs: list[Pair], rng: random.Random, share: float) -> list[Joined]:
    """Add to some requests a second one, as requests for several tools have it. The fourth is the other's tool."""
    by_source: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[2]].append(pair)
    out = []
    for request, text, source in pairs:
        if rng.random() < share:
            other = rng.choice(by_source[source])
            first, second = (request, other[0]) if rng.random() < 0.5 else (other[0], request)
            glue = rng.choice([". ", " and ", ", then ", ". Then "])
            out.append((first.rstrip(".") + glue + second, text, source, other[1]))
        else:
            out.append((request, text, source, text))
    return out


def batches(
    pairs: list[Joined], size: int, repeat: dict[str, int], near: set[str], rng: random.Random
) -> list[list[Joined]]:
    """Batches of one source each; half of the batches of sources in `near` consist of neighbours, which are harder."""
    by_source: dict[str, list[Joined]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[2]] += [pair] * repeat.get(pair[2], 1)
    out = []
    for source, own in by_source.items():
        rng.shuffle(own)
        if source in near:
            half = len(own) // 2
            first = sorted(own[:half], key=lambda pair: pair[1])
            blocks = [first[i : i + 16] for i in range(0, len(first), 16)]
            rng.shuffle(blocks)
            own = [pair for block in blocks for pair in block] + own[half:]
        out += [own[i : i + size] for i in range(0, len(own), size) if len(own[i : i + size]) >= size // 4]
    rng.shuffle(out)
    return out


def loss_of(queries: torch.Tensor, documents: torch.Tensor, same: torch.Tensor, reverse: float) -> torch.Tensor:
    """InfoNCE both ways. `same` marks the pairs that are no negatives although they are not the labelled ones."""
    scores = queries @ documents.T / TEMPERATURE
    scores = scores.masked_fill(same, -1e4)
    labels = torch.arange(len(queries), device="cuda")
    forward = functional.cross_entropy(scores, labels)
    return forward + reverse * functional.cross_entropy(scores.T, labels)


def train(
    model: Any,
    pairs: list[Pair],
    tokenizer: Any,
    *,
    size: int,
    epochs: int,
    rate: float,
    repeat: dict[str, int],
    near: set[str],
    seed: int,
    reverse: float = 0.5,
    share: float = 0.15,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = [batch for _ in range(epochs) for batch in batches(joined(pairs, rng, share), size, repeat, near, rng)]
    texts = Texts(tokenizer, [text for batch in plan for pair in batch for text in (pair[0], pair[1], pair[3])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    warm = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * max(0.0, 1 - step / len(plan))
    )
    model.train()
    for number, batch in enumerate(plan):
        asked = torch.tensor([texts.numbers[p[0]] for p in batch], device="cuda")
        right = torch.tensor([texts.numbers[p[1]] for p in batch], device="cuda")
        other = torch.tensor([texts.numbers[p[3]] for p in batch], device="cuda")
        same = (right[:, None] == right[None]) | (other[:, None] == right[None])
        # Requests that occur twice in a batch have two right tools.
        same |= asked[:, None] == asked[None]
        same[torch.arange(len(batch)), torch.arange(len(batch))] = False
        with torch.autocast("cuda", torch.bfloat16):
            q = pooled(model, *texts.batch(asked))
            d = pooled(model, *texts.batch(right))
        loss = loss_of(q, d, same, reverse)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 200 == 0:
            print(f"step {number} of {len(plan)}, loss {loss.item():.3f}", flush=True)


def tuned(folder: Path, pairs: list[Pair], tokenizer: Any) -> Any:
    """Train once per seed; return the mean, moved back towards the stock model, which knows more of other texts."""
    from transformers import AutoModel

    model: Any = None
    total: Weights = {}
    for seed in SEEDS:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).cuda()
        stock = {name: value.detach().clone() for name, value in model.state_dict().items()}
        total = total or {name: (1 - TUNED) * value.float() for name, value in stock.items()}
        train(model, pairs, tokenizer, seed=seed, **RECIPE)
        for name, value in model.state_dict().items():
            total[name] += TUNED / len(SEEDS) * value.float()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(total[name])
    return model


class _Pooled(torch.nn.Module):
    """The encoder with its pooling, as it is exported."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return pooled(self.model, input_ids, attention_mask)


def export(folder: Path) -> None:
    """Write `model.onnx`: weights of one byte with a scale per channel, activations quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval().cpu()
    ids = torch.ones(2, 8, dtype=torch.long)
    whole = folder / "whole.onnx"
    torch.onnx.export(
        _Pooled(model),
        (ids, ids),
        str(whole),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": {0: "b", 1: "n"}, "attention_mask": {0: "b", 1: "n"}, "vectors": {0: "b"}},
        opset_version=17,
        dynamo=False,
    )
    quantize_dynamic(str(whole), str(folder / "model.onnx"), weight_type=QuantType.QInt8, per_channel=True)
    whole.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    model = tuned(options.model, read(options.pairs), tokenizer_of(options.model))
    model.save_pretrained(options.out)
    export(options.out)


if __name__ == "__main__":
    main()
