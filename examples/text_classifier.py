"""A text classifier: sentences of different lengths, padded by a collate_fn.

    python examples/text_classifier.py --nproc-per-node 2

The loader stays plain: each rank takes its sentences and pads them to the longest of its own.
"""

import torch
import torchbearer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from torchbearer_ddp import data_parallel, device, is_rank_zero, run_distributed

GOOD = ["good", "great", "lovely", "fine", "happy"]
BAD = ["bad", "awful", "sad", "poor", "boring"]
OTHER = ["the", "film", "was", "a", "story", "of", "two", "people", "in", "town", "and"]
WORDS = {word: number for number, word in enumerate(["<pad>", *GOOD, *BAD, *OTHER])}


def sentences(count):
    """Sentences of 4 to 15 words, one of which tells whether it is praise."""
    draw = torch.Generator().manual_seed(0)

    def pick(words):
        return words[torch.randint(len(words), (), generator=draw)]

    for _ in range(count):
        label = int(torch.randint(2, (), generator=draw))
        length = int(torch.randint(3, 15, (), generator=draw))
        words = [pick(OTHER) for _ in range(length)]
        yield " ".join([*words, pick(GOOD if label else BAD)]), label


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    rows = [torch.tensor([WORDS[word] for word in text.split()]) for text in texts]
    return pad_sequence(rows, batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(len(WORDS), 16, mode="mean", padding_idx=0)
        self.last = nn.Linear(16, 2)

    def forward(self, x):
        return self.last(self.words(x))


def train():
    data = list(sentences(1200))
    model = Classifier()
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters(), lr=0.02),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[*data_parallel(global_batch=True)],
    )
    trial.with_generators(
        DataLoader(data[:1000], batch_size=32, shuffle=True, collate_fn=collate),
        DataLoader(data[1000:], batch_size=50, collate_fn=collate),
    )
    accuracy = trial.to(device()).run(4)[-1]["val_acc"]
    if is_rank_zero():
        print(f"accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    run_distributed(train)
