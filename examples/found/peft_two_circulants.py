"""Two active C3A adapters: the forward pass gives the output of the first adapter to the second adapter."""

from __future__ import annotations

import torch
from peft import C3AConfig, get_peft_model
from torch import nn

from examples.found.report import report


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = C3AConfig(block_size=2, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), config, "first").eval()
    model.add_adapter("second", config)
    model.base_model.set_adapter(["first", "second"])
    for name, parameter in model.named_parameters():
        if "c3a" in name:
            parameter.normal_(std=0.3)
    x = torch.randn(1, 4)
    before = model(x)
    model.base_model.merge_adapter()
    report("peft", model(x)[0], before[0])


if __name__ == "__main__":
    main()
