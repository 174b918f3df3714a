"""Train the table of token vectors with a tuned encoder as its teacher: `python -m training.table MODEL PAIRS OUT`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from training.encoder import Pair, Texts, encode, joined, read, tokenizer_of

WIDTH = 256
TEMPERATURE = 0.05


class Bag(torch.nn.Module):
    """One vector per piece, and how much a piece counts in requests and in tools."""

    def __init__(self, vectors: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.vectors = torch.nn.Parameter(vectors)
        self.logs = torch.nn.ParameterDict(
            {kind: torch.nn.Parameter(weights.log().clone()) for kind in ("query", "document")}
        )

    def forward(self, kind: str, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        weights = self.logs[kind].exp()[ids] * keep
        return functional.normalize((self.vectors[ids] * weights[..., None]).sum(1), dim=-1)


class Pieces(Texts):
    """Texts as ids without the signs for begin and end."""

    def bag(self, rows: torch.Tensor, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = self.batch(rows)
        keep = (mask.bool() & (ids != 101) & (ids != 102) & (ids != 100)).float()
        if dropout:
            keep = keep * (torch.rand_like(keep) > dropout)
        return ids, keep


@torch.no_grad()
def initial(model: Any, size: int, counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's vector of every piece alone, cut to WIDTH main components, and weights by rarity."""
    ids = torch.arange(size, device="cuda")
    rows = torch.stack([torch.full_like(ids, 101), ids, torch.full_like(ids, 102)], dim=1)
    out = []
    for start in range(0, size, 4096):
        part = rows[start : start + 4096]
        out.append(model(input_ids=part, attention_mask=torch.ones_like(part)).last_hidden_state.mean(1).float())
    vectors = torch.cat(out)
    vectors = vectors - vectors.mean(0)
    _, _, main = torch.linalg.svd(vectors, full_matrices=False)
    share = torch.tensor(counts / counts.sum(), dtype=torch.float32, device="cuda")
    return vectors @ main[:WIDTH].T, 1e-3 / (1e-3 + share)


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    target = functional.softmax(teacher / TEMPERATURE, dim=-1)
    return functional.kl_div(functional.log_softmax(student / TEMPERATURE, dim=-1), target, reduction="batchmean")


def train(
    model: Any, pairs: list[Pair], tokenizer: Any, *, repeat: dict[str, int], size: int = 1024, epochs: int = 12,
    rate: float = 2e-3, labels: float = 0.3, seed: int = 1,
) -> Bag:  # fmt: skip
    rng = random.Random(seed)
    torch.manual_seed(seed)
    wide = [pair for pair in pairs for _ in range(repeat.get(pair[2], 1))]
    sample = joined(wide, rng, 0.15)
    queries = Pieces(tokenizer, [p[0] for p in sample])
    documents = Pieces(tokenizer, [p[1] for p in sample])
    counts = np.ones(tokenizer.get_vocab_size())
    for texts in (queries, documents):
        counts += np.bincount(texts.ids.flatten().cpu().numpy(), minlength=len(counts))
    counts[0] = 1
    model.eval()
    bag = Bag(*initial(model, len(counts), counts)).cuda()
    q_teacher, d_teacher = encode(model, queries), encode(model, documents)
    pairs_q = torch.tensor([queries.numbers[p[0]] for p in sample], device="cuda")
    pairs_d = torch.tensor([documents.numbers[p[1]] for p in sample], device="cuda")
    optimizer = torch.optim.Adam(bag.parameters(), lr=rate)
    total = epochs * (len(sample) // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1 - step / total))
    step = 0
    for _ in range(epochs):
        order = torch.randperm(len(sample), device="cuda")
        for start in range(0, len(sample) - size + 1, size):
            rows = order[start : start + size]
            q, d = pairs_q[rows], pairs_d[rows]
            qs = bag("query", *queries.bag(q, 0.1))
            ds = bag("document", *documents.bag(d, 0.1))
            student, teacher = qs @ ds.T, q_teacher[q] @ d_teacher[d].T
            same = (d[:, None] == d[None]) | (q[:, None] == q[None])
            same.fill_diagonal_(False)
            hard = functional.cross_entropy(
                (student / TEMPERATURE).masked_fill(same, -1e4), torch.arange(size, device="cuda")
            )
            loss = labels * hard + divergence(student, teacher) + divergence(student.T, teacher.T)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 500 == 0:
                print(f"step {step} of {total}, loss {loss.item():.3f}", flush=True)
            step += 1
    return bag


def write(bag: Bag, pieces: list[str], path: Path) -> None:
    """Write the table: one byte per number, and a scale per piece, of the pieces that are worth their 256 bytes."""
    keep = [number for number, piece in enumerate(pieces) if is_useful(piece)]
    vectors = bag.vectors.detach().float().cpu().numpy()[keep]
    scales = np.abs(vectors).max(axis=1) / 127
    np.savez(
        path,
        pieces=np.frombuffer("\n".join(pieces[i] for i in keep).encode(), np.uint8),
        vectors=np.round(vectors / np.maximum(scales, 1e-9)[:, None]).astype(np.int8),
        scales=scales.astype(np.float16),
        query_weights=bag.logs["query"].detach().exp().cpu().numpy()[keep].astype(np.float16),
        document_weights=bag.logs["document"].detach().exp().cpu().numpy()[keep].astype(np.float16),
    )


def main() -> None:
    from transformers import AutoModel

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    tokenizer = tokenizer_of(options.model)
    model: Any = AutoModel.from_pretrained(options.model, dtype=torch.float32).cuda()
    bag = train(model, read(options.pairs), tokenizer, repeat={"bfcl": 4, "own": 4})
    write(bag, vocabulary(tokenizer), options.out)


def vocabulary(tokenizer: Any) -> list[str]:
    known = tokenizer.get_vocab()
    return sorted(known, key=lambda piece: known[piece])


def is_useful(piece: str) -> bool:
    """False for reserved pieces, and for single signs of scripts of which the vocabulary has no words."""
    letters = piece.lstrip("#")
    if piece.startswith("[") and len(piece) > 1:
        return False
    return len(letters) != 1 or ord(letters) <= 0x24F or "\u3040" <= letters <= "\u9fff"


if __name__ == "__main__":
    main()
