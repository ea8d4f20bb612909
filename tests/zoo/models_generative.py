"""Generative models."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.kinds import SAMPLES, Kind, normal, tensors


def mlp(inputs: int, outputs: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(latent_dim, 8), mlp(8, 1)
        self.validation_z = torch.randn(4, latent_dim)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        self.generated_imgs = self(z)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_validation_epoch_end(self) -> None:
        self.sample = self(self.validation_z.type_as(self.generator[0].weight))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


class WGANGP(L.LightningModule):
    """Gradients of gradients, and a generator that is trained at every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(4, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def gradient_penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.rand(real.size(0), 1, device=self.device).type_as(real)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = self.critic(between)
        (grads,) = torch.autograd.grad(
            out, between, torch.ones_like(out), create_graph=True, retain_graph=True
        )
        return ((grads.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        opt_g, opt_c = self.optimizers()
        z = torch.randn(real.size(0), 4, device=self.device).type_as(real)
        fake = self.generator(z).detach()
        c_loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.gradient_penalty(real, fake)
        opt_c.zero_grad()
        self.manual_backward(c_loss)
        opt_c.step()
        self.log("c_loss", c_loss)
        if (batch_idx + 1) % 2 == 0:
            self.toggle_optimizer(opt_g)
            g_loss = -self.critic(self.generator(z)).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g_loss", g_loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.generator.parameters(), lr=1e-3), torch.optim.RMSprop(
            self.critic.parameters(), lr=1e-3
        )


class VAE(L.LightningModule):
    """Logs numbers that were taken out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(8, 6), mlp(3, 8)

    def step(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        x, _ = batch
        mu, log_var = self.encoder(x).chunk(2, dim=-1)
        std = torch.exp(0.5 * log_var)
        z = mu + torch.randn_like(std) * std
        recon = F.mse_loss(self.decoder(z), x)
        kl = -0.5 * torch.mean(torch.sum(1 + log_var - mu.pow(2) - log_var.exp(), dim=1))
        loss = recon + 0.1 * kl
        return loss, {"recon": recon.item(), "kl": kl.item(), "loss": loss.item()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logs = self.step(batch)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logs = self.step(batch)
        self.log_dict({f"val_{k}": v for k, v in logs.items()})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class BetaVAE(VAE):
    """The weight of a term grows by a counter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_iter = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.num_iter += 1
        mu, log_var = self.encoder(x).chunk(2, dim=-1)
        q = torch.distributions.Normal(mu, torch.exp(log_var / 2))
        p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        recon = F.mse_loss(self.decoder(mu), x, reduction="none").sum(-1).mean()
        kl = torch.distributions.kl_divergence(q, p).sum(-1).mean()
        capacity = min(5.0, 5.0 * self.num_iter / 4)
        loss = recon + 2.0 * (kl - capacity).abs()
        self.log_dict({"recon": recon, "kl": kl, "capacity": capacity})
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_iter"] = self.num_iter

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_iter = checkpoint["num_iter"]


class DDPM(L.LightningModule):
    """Timesteps drawn for each sample; an averaged copy of the network that validates."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        self.steps = steps
        betas = torch.linspace(1e-2, 0.3, steps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))
        self.embed = nn.Embedding(steps, 4)
        self.net = mlp(8 + 4, 8)
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, net: nn.Module, x: Tensor) -> Tensor:
        t = torch.randint(0, self.steps, (x.size(0),), device=x.device)
        noise = torch.randn_like(x)
        a = self.alphas_cumprod[t].unsqueeze(-1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(net(torch.cat([noisy, self.embed(t)], -1)), noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch[0])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for e, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            e.mul_(0.9).add_(p.detach(), alpha=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.ema, batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.net.parameters(), *self.embed.parameters()], lr=1e-3)


class MDN(L.LightningModule):
    """A mixture of normal distributions."""

    def __init__(self, components: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.pi, self.mu, self.sigma = (nn.Linear(16, components) for _ in range(3))

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        h = self.body(x)
        mix = torch.distributions.Categorical(logits=self.pi(h))
        parts = torch.distributions.Normal(self.mu(h), F.softplus(self.sigma(h)) + 1e-3)
        return torch.distributions.MixtureSameFamily(mix, parts)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = -self(x).log_prob(y).mean()
        self.log("nll", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_nll", -self(x).log_prob(y).mean())
        self.log("val_rmse", ((self(x).mean - y) ** 2).mean().sqrt())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.net = flip, mlp(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        b = b * torch.exp(torch.tanh(s)) + t
        return torch.cat([b, a] if self.flip else [a, b], dim=1), torch.tanh(s).sum(1)


class RealNVP(L.LightningModule):
    """A normalizing flow, in bits per dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList([Coupling(i % 2 == 1) for i in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z, log_det = batch[0], 0
        for flow in self.flows:
            z, ld = flow(z)
            log_det = log_det + ld
        prior = torch.distributions.Normal(0.0, 1.0)
        nll = -(prior.log_prob(z).sum(1) + log_det)
        bpd = (nll * math.log2(math.e) / z.size(1)).mean()
        self.log("bpd", bpd)
        return bpd

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }


data = tensors(normal(SAMPLES, 8), normal(SAMPLES, seed=1))
KINDS = [
    Kind("gan", "manual optimization, two optimizers, `toggle_optimizer`", GAN, data, data),
    Kind("wgan_gp", "gradient penalty; one optimizer steps at every second batch", WGANGP, data),
    Kind("vae", "logs `.item()`", VAE, data, data),
    Kind("beta_vae", "a counter anneals the loss; it is in the checkpoint", BetaVAE, data, data),
    Kind("ddpm", "random timesteps, EMA that validates", DDPM, data, data),
    Kind("mdn", "`torch.distributions`; RMSE in validation", MDN, data, data),
    Kind("flow", "loop over layers that return pairs; StepLR", RealNVP, data),
]
