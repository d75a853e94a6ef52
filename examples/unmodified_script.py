"""For whoever cannot change the script: it does not know koila, and is run by `koila run`.

python examples/unmodified_script.py --steps 3
koila plan examples/unmodified_script.py
koila run --budget 48MiB examples/unmodified_script.py --steps 3
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--out", help="where the weights are written to")
options = parser.parse_args()

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
words = torch.randint(0, 500, (options.steps * options.batch_size, options.length), generator=generator)
labels = torch.randint(0, 10, (len(words),), generator=generator)
loader = DataLoader(TensorDataset(words, labels), batch_size=options.batch_size)

model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Flatten(1),
                      nn.Dropout(0.1), nn.Linear(64 * options.length, 10))  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    accuracy = (logits.argmax(1) == y).float().mean()
    print(f"step {step}: loss {loss.item():.6f}, accuracy {accuracy:.3f}")
if options.out:
    torch.save(model.state_dict(), options.out)
