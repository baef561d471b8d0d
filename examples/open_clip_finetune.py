"""Train a model of open_clip with HET-XL noise on its embeddings: two lines differ from a loop with ClipLoss.

A small CLIP from a configuration learns which of sixteen colours an image has; one caption in five is of another
image, like wrong captions on the web. With a published model, `open_clip.create_model_and_transforms` takes its place.
"""

import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor

from hetxl.integrations.open_clip import loss_for, wrap, zero_shot_head

COLOURS, STEPS, B = 16, 60, 64


def pairs(palette: Tensor, wrong: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [B, 3, 16, 16], captions [B, 8] of tokens, and colours [B]; a share of the captions is wrong."""
    colours = torch.randint(COLOURS, (B,))
    images = palette[colours][:, :, None, None] + 0.3 * torch.randn(B, 3, 16, 16)
    swapped = torch.where(torch.rand(B) < wrong, colours[torch.randperm(B)], colours)
    return images, captions_of(swapped), colours


def captions_of(colours: Tensor) -> Tensor:
    """Return tokens [n, 8]: start, colour, end (the largest, where open_clip pools), padding."""
    return torch.stack([torch.full_like(colours, 1), 2 + colours, torch.full_like(colours, 39)] + 5 * [0 * colours], 1)


def main() -> None:
    """Train, then classify by names, which needs no image of a class."""
    torch.manual_seed(0)
    palette = torch.randn(COLOURS, 3)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=40, width=32, heads=2, layers=1)
    model = CLIP(32, vision, text, output_dict=True)
    wrap(model, rank=4, scale_init=3.0)  # the noise is a part of the model: trained, moved and saved with it
    loss_function = loss_for(model)  # was: open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, STEPS + 1):
        images, captions, _ = pairs(palette, wrong=0.2)
        loss = loss_function(**model(images, captions))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    with torch.no_grad():
        images, _, colours = pairs(palette, wrong=0.0)
        names = model.eval().encode_text(captions_of(torch.arange(COLOURS)), normalize=True)
        head = zero_shot_head(model, names)  # a normal head: to_onnx and save_head accept it
        prediction = head.predict(model.encode_image(images, normalize=True))
    print(f"zero-shot top-1 {(prediction.top_class == colours).float().mean():.1%}, chance {1 / COLOURS:.1%}")
    print(f"mean entropy {prediction.entropy.mean():.3f} nats, {prediction.mutual_information.mean():.3f} from noise")


if __name__ == "__main__":
    main()
