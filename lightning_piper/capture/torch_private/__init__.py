"""Which private names of torch and torchmetrics does a capture use, and what does it rely on?"""
