"""Tags for each word of sentences of different lengths: padding does not count in the loss."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchbearer import Trial

WORDS, TAGS, LONGEST, PADDING = 20, 4, 9, -100


class Sentences(Dataset):
    def __init__(self, count):
        self.sentences = [torch.randint(1, WORDS, (1 + 5 * i % LONGEST,)) for i in range(count)]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return self.sentences[index]


def collate(sentences):
    padded = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    tags = [sentence * 7 % TAGS for sentence in sentences]
    return padded, nn.utils.rnn.pad_sequence(tags, batch_first=True, padding_value=PADDING)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6, padding_idx=0)
        self.convolve = nn.Conv1d(6, TAGS, 3, padding=1)

    def forward(self, words):
        return self.convolve(self.embed(words).transpose(1, 2))


torch.manual_seed(11)
model = Tagger()
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.3),
    nn.CrossEntropyLoss(ignore_index=PADDING),
    metrics=["loss"],
    verbose=0,
)
trial.with_generators(
    DataLoader(Sentences(66), 12, collate_fn=collate),
    DataLoader(Sentences(25), 12, collate_fn=collate),
)
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
