"""A plain LoRA training as torchrun restarts it: what the model of the local hosts would be trained with by hand. Runs
on a host; writes when each step ended and how many ranks did it. Saves every 20 steps and goes on from there."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

MODEL, STEPS, SAVED = "/data/models/tiny", Path("/root/steps"), Path("/root/elastic.pt")
ROWS, LENGTH = 2, 256


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    step = 0
    if SAVED.exists():
        saved = torch.load(SAVED)
        step = saved["step"]
        model.load_state_dict(saved["adapter"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
    while True:
        ids = torch.randint(0, base.config.vocab_size, (ROWS, LENGTH))
        ddp(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        with STEPS.open("a") as file:
            file.write(f"{time.time()} {dist.get_world_size()}\n")
        if step % 20 == 0:
            adapter = {name: each for name, each in model.named_parameters() if each.requires_grad}
            torch.save({"step": step, "adapter": adapter, "optimizer": optimizer.state_dict()}, SAVED)


if __name__ == "__main__":
    main()
