"""Pure functions of values: no `nn.Module` subclass, no global, no ambient mesh. Layers 0 to 4, see each module."""
