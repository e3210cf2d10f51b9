"""The local cloud's ECS API: an emulator of the part of Alibaba Cloud ECS that spotune uses, over real hosts."""
