"""Two active OFT adapters: a merge applies them in the other order."""

from __future__ import annotations

import torch
from peft import OFTConfig, get_peft_model
from torch import nn

from examples.found.report import report


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = OFTConfig(oft_block_size=4, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(4, 3)), config, "first").eval()
    model.add_adapter("second", config)
    model.base_model.set_adapter(["first", "second"])
    for name, parameter in model.named_parameters():
        if "oft" in name:
            parameter.normal_(std=0.3)
    x = torch.randn(1, 4)
    before = model(x)
    model.base_model.merge_adapter()
    report("peft", before[0], model(x)[0])


if __name__ == "__main__":
    main()
