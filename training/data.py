"""Token files of corpus.py as training windows and held-out windows."""

from pathlib import Path

import numpy as np
import torch

DOMAINS = ("prose", "python", "man", "docs")
# How often a document of each domain comes in one epoch: the small domains twice.
REPEATS = {"prose": 2, "python": 1, "man": 1, "docs": 2}


def load_documents(corpus: Path, domain: str, split: str) -> list[np.ndarray]:
    """Token ids of each document, with the end-of-text token last."""
    with np.load(corpus / f"{domain}.{split}.npz") as file:
        return np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])


class TrainingWindows:
    """Windows of length+1 tokens; documents and windows are shuffled anew in each epoch.

    `epoch` and `position` say all that is needed to go on from the same place.
    """

    def __init__(self, corpus: Path, length: int, seed: int, epoch: int = 0, position: int = 0):
        self.documents = []
        for domain in DOMAINS:
            self.documents += load_documents(corpus, domain, "train") * REPEATS[domain]
        self.length, self.seed = length, seed
        self._start_epoch(epoch)
        self.position = position

    def _start_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.documents))
        self.stream = np.concatenate([self.documents[i] for i in order])
        self.order = rng.permutation((len(self.stream) - 1) // self.length)
        self.epoch, self.position = epoch, 0

    def next_batch(self, count: int) -> torch.Tensor:
        """(count, length+1) token ids"""
        if self.position + count > len(self.order):
            self._start_epoch(self.epoch + 1)
        starts = self.order[self.position : self.position + count] * self.length
        self.position += count
        windows = self.stream[starts[:, None] + np.arange(self.length + 1)]
        return torch.from_numpy(windows.astype(np.int64))


def held_out_windows(corpus: Path, domain: str, length: int, limit: int | None) -> torch.Tensor:
    """(windows, length+1) token ids of a domain's held-out documents, end to end."""
    stream = np.concatenate(load_documents(corpus, domain, "held_out")).astype(np.int64)
    starts = np.arange((len(stream) - 1) // length) * length
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)])
