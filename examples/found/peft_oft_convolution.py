"""OFT of a convolution: the forward pass rotates the overlapping windows of the image, not the weight."""

from __future__ import annotations

import torch
from peft import OFTConfig, get_peft_model
from torch import nn

from examples.found.report import report


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1))
    model = get_peft_model(base, OFTConfig(oft_block_size=4, target_modules=["0"])).eval()
    for name, parameter in model.named_parameters():
        if "oft" in name:
            parameter.normal_(std=0.3)
    image = torch.randn(1, 4, 6, 6)
    before = model(image)
    merged = model.merge_and_unload()
    report("peft", merged(image)[0, 0, 0, :3], before[0, 0, 0, :3])


if __name__ == "__main__":
    main()
