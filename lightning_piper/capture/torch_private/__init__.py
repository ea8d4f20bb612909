"""The private names of torch and torchmetrics that a capture uses, and the behavior on which it relies."""
