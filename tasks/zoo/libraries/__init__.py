"""Networks that timm, torchvision and transformers build, and what is assembled from their parts."""
