"""LoRA of a convolution with circular padding: the adapter pads with zeros, and the merged model does not."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from examples.found.report import report


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"])).eval()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.normal_(std=0.3)
    image = torch.randn(1, 4, 6, 6)
    before = model(image)
    merged = model.merge_and_unload()
    report("peft", merged(image)[0, 0, 0, :3], before[0, 0, 0, :3])


if __name__ == "__main__":
    main()
