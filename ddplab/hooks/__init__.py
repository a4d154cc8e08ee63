"""Communication hooks: what DDP may send instead of float32 gradients. One readable class each."""
