"""Alibaba Cloud ECS behind the port (`inventory.cloud`): calls, requests and answers, a resource a file."""
