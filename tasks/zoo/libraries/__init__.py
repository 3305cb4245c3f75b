"""Networks that timm, torchvision and transformers build, and networks assembled from their parts."""
