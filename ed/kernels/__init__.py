"""Custom operators with Triton kernels, where torch is bound by memory or kernel launches."""
