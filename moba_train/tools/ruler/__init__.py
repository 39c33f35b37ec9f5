"""RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654), made without downloads."""
