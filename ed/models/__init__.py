"""Networks. Each is an ordinary `nn.Module` from inputs to outputs."""
