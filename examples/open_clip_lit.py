"""LiT with open_clip: a locked image tower, its embeddings computed once, and a text tower trained with HET-XL noise.

The image tower first learns to tell sixteen colours apart, with labels; in your program it is a published one
(`open_clip.create_model("ViT-B-32", pretrained=…)`). Its weights do not change afterwards. One caption in five
belongs to another image, like wrong captions from the web.
"""

import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from hetxl.integrations.open_clip import loss_for, unwrap, wrap

COLOURS, IMAGES, B, D = 16, 2048, 128, 32


def captions_of(colours: Tensor) -> Tensor:
    """Return tokens [n, 8]: start, colour, end (the largest, where open_clip pools), padding."""
    return torch.stack([torch.full_like(colours, 1), 2 + colours, torch.full_like(colours, 39)] + 5 * [0 * colours], 1)


def main() -> None:
    """Train the image tower, lock it, embed all images once, train the text tower, classify by names."""
    torch.manual_seed(0)
    colours = torch.randint(COLOURS, (IMAGES,))
    images = torch.randn(COLOURS, 3)[colours][:, :, None, None] + 0.3 * torch.randn(IMAGES, 3, 16, 16)
    swapped = torch.where(torch.rand(IMAGES) < 0.2, colours[torch.randperm(IMAGES)], colours)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    model = CLIP(D, vision, CLIPTextCfg(context_length=8, vocab_size=40, width=32, heads=2, layers=1), output_dict=True)
    head = torch.nn.Linear(D, COLOURS)
    optimizer = torch.optim.AdamW([*model.visual.parameters(), *head.parameters()], lr=2e-3)
    for rows in torch.randperm(IMAGES).split(B):  # stands for published weights
        cross_entropy(head(model.visual(images[rows])), colours[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.lock_image_tower()  # open_clip's own method; no gradients from here on
    wrap(model, rank=4, scale_init=3.0)  # the paper's start of the scale with noise
    loss_function = loss_for(model)
    model.visual.eval()
    with torch.no_grad():
        embeddings = torch.cat([model.encode_image(part, normalize=True) for part in images.split(B)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    order = torch.cat([torch.randperm(IMAGES) for _ in range(6)]).split(B)
    for step, rows in enumerate(order, 1):
        texts = model.encode_text(captions_of(swapped[rows]), normalize=True)
        loss = loss_function(embeddings[rows], texts, model.logit_scale.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 24 == 0:
            print(f"step {step}: loss {loss.item():.3f}, scale {model.logit_scale.exp().item():.1f}")

    gradients = sum(
        parameter.grad is not None for parameter in model.visual.parameters() if not parameter.requires_grad
    )
    print(f"gradients in the locked tower since it was locked: {gradients}")
    unwrap(model.eval())
    with torch.no_grad():
        names = normalize(model.encode_text(captions_of(torch.arange(COLOURS))), dim=-1)
        right = (embeddings @ names.T).argmax(-1) == colours
    print(f"zero-shot top-1 {right.float().mean():.1%}, chance {1 / COLOURS:.1%}")


if __name__ == "__main__":
    main()
