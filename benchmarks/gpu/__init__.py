"""The engine on one CUDA card, without Ray and HTTP."""
