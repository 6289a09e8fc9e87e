"""Layers that mix tokens by other means than attention, and what they keep of a block. A mixer is
one file, with a class that inherits from `Mixer`, and `LayerKind.mixer` has its value.
"""
