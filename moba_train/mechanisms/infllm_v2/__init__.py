"""InfLLM-V2 (Zhao et al. 2025, arXiv:2509.24663): dense attention that becomes block-sparse for long documents."""
