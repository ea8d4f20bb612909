"""Time series, speech, decisions, graphs, recommendations, few samples."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from tests.zoo.kinds import BATCH, SAMPLES, Kind, integers, normal, samples, tensors


class Forecaster(L.LightningModule):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, lengths = batch
        mask = torch.arange(x.size(1), device=x.device)[None] < lengths[:, None]
        loss = F.mse_loss(self(x, lengths)[mask], y[mask])
        self.log("mse", loss, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, lengths = batch
        last = self(x, lengths)[torch.arange(len(x)), lengths - 1]
        self.log("mae_of_last", F.l1_loss(last, y[torch.arange(len(x)), lengths - 1]), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "mse"}


class Stateful(L.LightningModule):
    """The hidden state goes on from batch to batch, and begins anew with each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        loss = F.mse_loss(self.head(out[:, -1]).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Speech(L.LightningModule):
    """CTC, with the lengths of sounds and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = (
            nn.Conv1d(4, 8, 3, padding=1),
            nn.GRU(8, 8, batch_first=True, bidirectional=True),
        )
        self.head, self.ctc = nn.Linear(16, 6), nn.CTCLoss(blank=0, zero_infinity=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sounds, texts, sound_lengths, text_lengths = batch
        hidden, _ = self.gru(F.relu(self.conv(sounds)).transpose(1, 2))
        log_probs = F.log_softmax(self.head(hidden), dim=-1).transpose(0, 1)
        loss = self.ctc(log_probs, texts, sound_lengths, text_lengths)
        self.log("ctc", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Corridor:
    """An environment: five fields, the last one pays."""

    def __init__(self) -> None:
        self.place = 0

    def reset(self) -> np.ndarray:
        self.place = 0
        return self.seen()

    def seen(self) -> np.ndarray:
        return np.eye(5)[self.place]

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.place = max(0, self.place + (1 if action else -1))
        done = self.place == 4
        return self.seen(), float(done) - 0.1, done


class Replay(IterableDataset):
    def __init__(self, buffer: deque[Any], count: int) -> None:
        self.buffer, self.count = buffer, count

    def __iter__(self) -> Iterator[Any]:
        for i in np.random.choice(len(self.buffer), self.count, replace=len(self.buffer) < self.count):
            yield self.buffer[i]


class DQN(L.LightningModule):
    """Plays one step of its environment at each batch, and learns from what it remembers."""

    def __init__(self, sync_rate: int = 2, gamma: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = copy.deepcopy(self.net)
        self.env, self.buffer = Corridor(), deque[Any](maxlen=50)
        self.state, self.total_reward, self.epsilon = self.env.reset(), 0.0, 1.0
        for _ in range(8):
            self.play_step(1.0)

    @torch.no_grad()
    def play_step(self, epsilon: float) -> tuple[float, bool]:
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            action = int(self.net(torch.tensor(self.state[None], dtype=self.net[0].weight.dtype)).argmax())
        new_state, reward, done = self.env.step(action)
        self.buffer.append((self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epsilon = max(0.1, self.epsilon - 0.05)
        reward, done = self.play_step(self.epsilon)
        self.total_reward = 0.0 if done else self.total_reward + reward
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        loss = F.mse_loss(values, next_values * self.hparams.gamma + rewards)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss, "total_reward": self.total_reward})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Replay(self.buffer, SAMPLES), batch_size=BATCH)


@dataclass
class Data:
    x: Tensor
    edge_index: Tensor
    y: Tensor
    batch: Tensor

    def to(self, device: Any) -> Data:
        return Data(*(t.to(device) for t in (self.x, self.edge_index, self.y, self.batch)))


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.zeros(x.size(0), dtype=x.dtype, device=x.device).index_add_(
            0, target, torch.ones_like(x[source, 0])
        )
        out = torch.zeros(x.size(0), self.lin.out_features, dtype=x.dtype, device=x.device)
        return out.index_add_(0, target, self.lin(x)[source]) / degree.clamp(min=1).unsqueeze(-1)


class GraphClassifier(L.LightningModule):
    """Several graphs in one, with the number of the graph for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = GraphConv(3, 8), GraphConv(8, 8), nn.Linear(8, 2)

    def forward(self, data: Data) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(data.x, data.edge_index)), data.edge_index))
        graphs = int(data.batch.max()) + 1
        pooled = torch.zeros(graphs, x.size(1), dtype=x.dtype, device=x.device).index_add_(0, data.batch, x)
        return self.head(pooled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self(batch).argmax(-1) == batch.y).double().mean(), batch_size=len(batch.y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4)


class Recommender(L.LightningModule):
    """Factors of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(6, 4), nn.Embedding(9, 4)
        self.user_bias, self.item_bias = nn.Embedding(6, 1), nn.Embedding(9, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        dot = (self.user(user) * self.item(item)).sum(-1)
        return dot + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        user, item, rating = batch
        loss = F.mse_loss(self(user, item), rating)
        penalty = 1e-3 * (self.user(user).norm(dim=-1) + self.item(item).norm(dim=-1)).mean()
        self.log("mse", loss, on_step=False, on_epoch=True)
        return loss + penalty

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        user, item, rating = batch
        self.log("rmse", torch.sqrt(F.mse_loss(self(user, item), rating)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class ProtoNet(L.LightningModule):
    """The classes of each batch are found in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        support, query = self.net(x).chunk(2)
        support_y, query_y = y.chunk(2)
        classes, _ = torch.unique(support_y).sort()
        prototypes = torch.stack([support[torch.where(support_y == c)[0]].mean(0) for c in classes])
        distances = torch.cdist(query, prototypes) ** 2
        labels = (classes[None] == query_y[:, None]).long().argmax(-1)
        loss = F.cross_entropy(-distances, labels)
        self.log("loss", loss)
        self.log("acc", ((-distances).argmax(1) == labels).double().mean())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)]


def series() -> list[Any]:
    return [
        (normal(n, 2, seed=i), normal(n, seed=50 + i), n)
        for i, n in enumerate(int(n) for n in integers(7, SAMPLES, low=2))
    ]


def padded(items: list[Any]) -> Any:
    xs, ys, lengths = zip(*items, strict=True)
    return pad_sequence(xs, batch_first=True), pad_sequence(ys, batch_first=True), torch.tensor(lengths)


def graphs() -> list[Any]:
    return [
        (normal(3 + i % 3, 3, seed=i), integers(3 + i % 3, 2, 5, seed=i), torch.tensor(i % 2))
        for i in range(SAMPLES)
    ]


def joined(items: list[Any]) -> Data:
    starts = np.cumsum([0] + [len(x) for x, _, _ in items])
    return Data(
        torch.cat([x for x, _, _ in items]),
        torch.cat([edges + int(start) for (_, edges, _), start in zip(items, starts, strict=False)], dim=1),
        torch.stack([y for _, _, y in items]),
        torch.cat([torch.full((len(x),), i) for i, (x, _, _) in enumerate(items)]),
    )


def episodes() -> Any:
    x, y = normal(2 * SAMPLES, 5), torch.arange(2 * SAMPLES) % 8 // 4 + 2 * (torch.arange(2 * SAMPLES) % 2)
    return DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2 * BATCH)


spoken = tensors(
    normal(SAMPLES, 4, 8),
    integers(6, SAMPLES, 3, low=1),
    integers(9, SAMPLES, low=7),
    integers(4, SAMPLES, low=1, seed=2),
)
rated = tensors(integers(6, SAMPLES), integers(9, SAMPLES, seed=1), normal(SAMPLES, seed=2))
KINDS = [
    Kind(
        "forecast",
        "`pack_padded_sequence`, ReduceLROnPlateau",
        Forecaster,
        samples(series(), padded),
        samples(series(), padded),
    ),
    Kind(
        "stateful",
        "hidden state kept between batches",
        Stateful,
        tensors(normal(SAMPLES, 5, 2), normal(SAMPLES, seed=1)),
    ),
    Kind("speech", "CTC with lengths", Speech, spoken),
    Kind(
        "dqn", "replay buffer, environment and target network in the step; iterable data", DQN, lambda: None
    ),
    Kind(
        "graphs",
        "an object with `.to` and `edge_index`; number of graphs from the data",
        GraphClassifier,
        samples(graphs(), joined),
        samples(graphs(), joined),
    ),
    Kind("recommender", "embeddings of users and items, Adagrad", Recommender, rated, rated),
    Kind("protonet", "classes found by `torch.unique`", ProtoNet, episodes),
]
