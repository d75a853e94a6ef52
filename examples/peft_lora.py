"""For whoever fine-tunes with LoRA: a frozen language model with peft's adapters, a batch that would not fit.

Gradients are made for the adapters only, so that a budget is spent on activations alone. Run it with
`python examples/peft_lora.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import koila

BUDGET = "512KiB"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    return get_peft_model(GPT2LMHeadModel(config).double(), lora).double()


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    net = model()
    net.train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 61, (10, 12), generator=generator)
        if use_koila:
            ids = koila.lazy(ids, budget=budget)
        logits = net(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapters = {name: value for name, value in net.state_dict().items() if "lora" in name}
    return {**adapters, "loss": loss.detach()}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
