"""The texts of our pages, and what they are in Chinese: `Words(language)` says them.

Keys are the English texts as the pages ask for them; what stands in braces is filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Say = Callable[..., str]
"""A text by its English words, with what is in its braces by name."""

EMPTY_ANSWER = "(an empty answer)"
"""What stands in the place of an answer without a word."""

ZH = {
    # states
    "starting": "正在启动",
    "running": "进行中",
    "waiting": "正在等待节点",
    "finished": "已完成",
    "failed": "失败",
    "stopped": "已停止",
    "not known": "未知",
    # why it ended
    "stopped on request, after saving a checkpoint": "已按要求停止，停止前保存了检查点",
    "stopped on request; the ranks did not save in time, the last checkpoint stands": (
        "已按要求停止；各进程未能及时保存，以上一个检查点为准"
    ),
    # head of the report
    "started {began}; this page was made {made}": "开始于 {began}；本页生成于 {made}",
    "Started with": "启动命令",
    # tiles
    "steps": "步数",
    "{step} of {total}": "{step} / {total}",
    "{epoch} epochs": "{epoch} 轮",
    "training loss": "训练损失",
    "from {first}": "起初 {first}",
    "best validation loss": "最低验证损失",
    "best validation loss (DPO)": "最低验证损失（DPO）",
    "step {step}": "第 {step} 步",
    "perplexity {value}, step {step}": "困惑度 {value}，第 {step} 步",
    "{share} preferred, step {step}": "偏好正确 {share}，第 {step} 步",
    "useful tokens/s": "有效 token/秒",
    "median": "中位数",
    "memory": "显存或内存",
    "peak over all ranks": "各进程中最多",
    "time": "用时",
    "of the last start": "最后一次启动",
    "over {count} starts": "{count} 次启动合计",
    "cost": "费用",
    "machines, over all starts": "机器费用，所有启动合计",
    "{price} an hour": "每小时 {price}",
    "nothing billed": "不计费",
    "this machine": "本机",
    # durations
    "{hours} h {minutes} min": "{hours} 小时 {minutes} 分",
    "{minutes} min {seconds} s": "{minutes} 分 {seconds} 秒",
    "{seconds} s": "{seconds} 秒",
    # curves
    "Curves": "曲线",
    "No optimizer step was done.": "没有完成任何一步优化。",
    "mean of {count} steps": "每点为 {count} 步的平均",
    "Dashed: resumed from a checkpoint.": "虚线：从检查点继续。",
    "Dotted: the run ended there.": "点线：训练在此中断。",
    "Loss": "损失",
    "Token accuracy": "token 准确率",
    "Pairs preferred": "偏好正确的比例",
    "Rewards": "奖励",
    "Learning rate": "学习率",
    "Gradient norm": "梯度范数",
    "Speed": "速度",
    "Memory": "显存或内存",
    "Utilisation": "利用率",
    "Waiting": "等待其他进程的时间占比",
    "training": "训练",
    "validation": "验证",
    "chosen": "较好的回答",
    "rejected": "较差的回答",
    "margin": "差距",
    "learning rate": "学习率",
    "before clipping": "裁剪前",
    "useful": "有效",
    "with padding": "含填充",
    "most held": "最多占用",
    "planned": "计划",
    "MFU": "MFU",
    "HFU": "HFU",
    "%": "%",
    "GiB": "GiB",
    "GPU busy": "GPU 忙碌",
    "waiting for ranks": "等待其他进程",
    "step": "步",
    "tokens/s": "token/秒",
    # plan
    "Plan against measured": "计划与实测",
    "The run has no plan to be held against.": "这次训练没有可对照的计划。",
    "what": "项目",
    "measured": "实测",
    "of plan": "占计划",
    "memory of a rank": "每个进程的显存或内存",
    "a step": "每步用时",
    "a step of the last start": "每步用时（最后一次启动）",
    "the whole run": "整个训练",
    "the steps made": "已完成的步数",
    "tokens a step": "每步 token 数",
    "the planned seconds are times {factor}, as earlier runs were: {runs}": "计划时间按以往训练乘以 {factor}：{runs}",
    # starts
    "Starts": "各次启动",
    "machines": "机器",
    "began": "开始于",
    "took": "用时",
    "why the machines changed": "更换机器的原因",
    "lost": "损失",
    # machines
    "Machines": "机器",
    "name": "名称",
    "type": "规格",
    "zone": "可用区",
    "ranks": "进程数",
    "an hour": "每小时",
    "all together": "合计",
    " ": "",
    ", ": "，",
    ": ": "：",
    "Resumed from step {step}, which {ranks} ranks had saved.": "从第 {step} 步继续，该检查点由 {ranks} 个进程保存。",
    # use
    "How to load what it learned": "如何加载训练结果",
    "with PEFT; merged": "用 PEFT 加载；合并",
    "served by vLLM": "用 vLLM 提供服务",
    "path/to: wherever the folder of the base lies": "path/to：换成基座模型目录实际所在的位置",
    "replace path/to with the full path of ~/.cache/spotune/models; fab train --model tiny --here makes it": (
        "path/to：主目录/.cache/spotune/models（写完整路径，不能用 ~），由 fab train --model tiny --here 生成"
    ),
    "no hub has the base; without its folder: {command}, then": "Hub 上没有这个基座；没有它的目录时：{command}，然后",
    "a plain model, where one is wanted": "需要普通模型时才用这一行",
    "vLLM serves no such adapter: merge it, and serve the merged model": (
        "vLLM 不支持这种适配器：请先合并，再提供合并后的模型"
    ),
    # data
    "Data": "数据",
    "records": "记录",
    "samples": "样本",
    "tokens": "token",
    "tokens learned from": "参与学习的 token",
    "rows": "行",
    "rows filled": "行的装满程度",
    "longest sample after cutting, tokens": "最长样本（截断之后，token）",
    "longest pair in its row, tokens": "一行里最长的一对回答（token）",
    "cut at the longest length": "因过长被截断",
    "left out: bad": "舍弃：有错误",
    "left out: nothing to learn": "舍弃：没有可学的内容",
    "shape": "格式",
    "end of an answer": "回答的结束标记",
    "file": "文件",
    "size": "大小",
    # answers
    "Held-out answers": "验证数据上的回答",
    "The base and tuned models were not evaluated on the held-out records yet. To add their answers to this page:": (
        "尚未在验证数据上评测基座模型与微调后模型；运行下面的命令后，本页会显示两者的回答："
    ),
    "{count} of the records held out, spread over them: what the base model and the tuned one said.": (
        "从验证数据里均匀取出的 {count} 条：基座模型与微调后模型各自的回答。"
    ),
    "Answers on {name}": "{name} 上的回答",
    "{count} of its records: what the base model and the tuned one said.": (
        "其中 {count} 条：基座模型与微调后模型各自的回答。"
    ),
    "1 of {samples} was trained on: the loss is too good for it.": (
        "{samples} 条中有 1 条参与过训练：这一条的损失偏低。"
    ),
    "{learned} of {samples} were trained on: the loss is too good for these.": (
        "{samples} 条中有 {learned} 条参与过训练：这些条的损失偏低。"
    ),
    "The only one was trained on: its loss tells nothing about new records.": (
        "唯一的一条参与过训练：它的损失不能说明新数据上的表现。"
    ),
    "All {samples} were trained on: their loss tells nothing about new records.": (
        "{samples} 条全都参与过训练：它们的损失不能说明新数据上的表现。"
    ),
    EMPTY_ANSWER: "（空的回答）",
    "asked": "问题",
    "wanted": "期望",
    "base": "基座",
    "tuned": "微调后",
    "held-out loss": "验证损失",
    "loss": "损失",
    "language-modelling loss of the chosen answers": "较好的回答的语言模型损失",
    "perplexity": "困惑度",
    "token accuracy": "token 准确率",
    "exact match": "完全匹配率",
    "ROUGE-L": "ROUGE-L",
    "pairs: chosen is likelier": "偏好对：较好的回答概率更高",
    "pairs: by nats": "偏好对：高出多少 nat",
    "pairs: won against the base": "偏好对：胜过基座的比例",
    "win margin, nats": "胜出幅度（nat）",
}


@dataclass(frozen=True)
class Words:
    """Says texts in a language; what has no Chinese is said in English."""

    language: str = "en"

    def __call__(self, text: str, /, **values: Any) -> str:
        return (ZH.get(text, text) if self.language == "zh" else text).format(**values)


ENGLISH = Words()
