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

FAULTS = {
    # of a record
    "not JSON: the key {key} stands twice in one object": "不是 JSON：同一个对象里有两个键 {key}",
    "not JSON: {value} is no JSON value": "不是 JSON：不能写 {value}",
    "not JSON: Expecting value at character {number}": "不是 JSON：第 {number} 个字符处缺少值",
    "not JSON: Expecting ',' delimiter at character {number}": "不是 JSON：第 {number} 个字符处缺少逗号",
    "not JSON: Expecting ':' delimiter at character {number}": "不是 JSON：第 {number} 个字符处缺少冒号",
    "not JSON: Expecting property name enclosed in double quotes at character {number}": (
        "不是 JSON：第 {number} 个字符处应当是双引号括起来的键"
    ),
    "not JSON: Unterminated string starting at character {number}": (
        "不是 JSON：第 {number} 个字符处开始的字符串没有结束"
    ),
    "not JSON: Extra data at character {number}": "不是 JSON：第 {number} 个字符起是多余的内容",
    "not JSON: {what} at character {number}": "不是 JSON：第 {number} 个字符处有错（{what}）",
    "not JSON: {what}": "不是 JSON：{what}",
    "not UTF-8 at byte {number}": "不是 UTF-8：从第 {number} 个字节起",
    "not UTF-8 at byte {number} of a text": "不是 UTF-8：从文本的第 {number} 个字节起",
    "not UTF-8 in the column {column}": "不是 UTF-8：在列 {column} 中",
    "nested too deeply": "嵌套太深",
    "longer than {size} MiB": "超过 {size} MiB",
    "{fields} fields, but line 1 names {columns} columns": "有 {fields} 个字段，而第 1 行有 {columns} 个列名",
    "an object is expected, found {kind}": "应当是一个对象，却是{kind}",
    "{has} without {lacks}, which is missing or empty": "有 {has}，但缺少 {lacks}，或者它是空的",
    "none of {shapes}; keys: {keys}": "没有任何一种格式所需的键（{shapes}）；它的键：{keys}",
    "{key} must be a list of at least one turn": "{key} 必须是列表，至少有一轮",
    "turn {turn} needs a role and a content of text, found {kind}": (
        "第 {turn} 轮要有 role，以及是文本的 content，却是{kind}"
    ),
    "turn {turn} has the role {role}; {known} are known": "第 {turn} 轮的 role 是 {role}；可用的是 {known}",
    "turn {turn} answers a tool call, but none was made before it": "第 {turn} 轮是工具的结果，但前面没有工具调用",
    "no assistant turn, so nothing to learn": "没有助手的轮次，没有可学的内容",
    "no user turn, so there is nothing to answer": "没有用户的轮次，没有可回答的内容",
    "every assistant turn is empty": "助手的每一轮都是空的",
    "{what} must be text, found {kind}": "{what} 必须是文本，却是{kind}",
    "prompt and completion must both be text or both be lists of turns, found {one} and {other}": (
        "prompt 和 completion 要么都是文本，要么都是消息列表，却是{one}和{other}"
    ),
    "chosen and rejected are the same, so there is nothing to prefer": "chosen 和 rejected 相同，分不出好坏",
    "{has} without {lacks}; a preference needs both": "有 {has}，但没有 {lacks}；偏好对两者都要有",
    "it has {what}, and text alone is learned; leave such records out": (
        "带有 {what}，而这里只学文本；请去掉这样的记录"
    ),
    "{where} holds a NUL character": "{where} 中有 NUL 字符",
    "{where} holds half of a surrogate pair, or bytes that are not UTF-8": (
        "{where} 中有不成对的代理字符（surrogate），或不是 UTF-8 的字节"
    ),
    "the model's chat template leaves out {what} of turn {turn}, so it cannot be learned; take it out, or take a "
    "model whose template shows it": (
        "模型的聊天模板不显示第 {turn} 轮的{what}，学不到；请把它去掉，或换一个模板能显示它的模型"
    ),
    "turn {turn} has thoughts, but the model's chat template asks for an answer without any": (
        "第 {turn} 轮有思考过程，但模型的聊天模板要求回答不带思考过程"
    ),
    "{what} is empty": "{what} 是空的",
    # of all of them, or of a file
    "all records of a run have one shape; these are {counts}: take the others out, or write them as those "
    "(docs/data.md has a record of each shape)": (
        "一次训练的所有记录必须是同一种格式，这里有 {counts}：请去掉其他的，"
        "或改写成同一种（每种格式的样例见 docs/data.zh.md）"
    ),
    "no record can be used; {bad} is bad": "没有一条记录可用；有错误的有 {bad} 条",
    "no record can be used; {bad} are bad": "没有一条记录可用；有错误的有 {bad} 条",
    "no record can be used": "没有一条记录可用",
    "{file}: not UTF-8; it looks like {encoding}, in which {excerpt} stands there; convert it: {command}": (
        "{file}：不是 UTF-8；看起来是 {encoding}，按它读出来有 {excerpt}；转换命令：{command}"
    ),
}
"""What the readers of data say is wrong. The first whose words fit is taken."""

PARTS = {
    "the content": "内容",
    "the thoughts": "思考过程",
    "the reasoning_content": "思考过程（reasoning_content）",
    "a tool call": "工具调用",
    "the arguments of a tool call": "工具调用的参数",
}
"""Of a turn."""
KINDS = {
    "null": "空值（null）",
    "text": "文本",
    "number": "数字",
    "float": "数字",
    "list": "列表",
    "object": "对象",
    "true or false": "true 或 false",
}
"""Of values."""

ZH = {
    **FAULTS,
    **PARTS,
    **KINDS,
    # states
    "starting": "正在启动",
    "running": "进行中",
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
    "{count} starts": "共启动 {count} 次",
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
    "most, of any rank": "各进程中最多",
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
    "Dashed: gone on with from a checkpoint.": "虚线：从检查点继续。",
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
    # machines
    "Machines": "机器",
    "Start {number} was on {hosts}.": "第 {number} 次启动用的是 {hosts}。",
    "name": "名称",
    "type": "规格",
    "zone": "可用区",
    "ranks": "进程数",
    "an hour": "每小时",
    "all together": "合计",
    " ": "",
    ", ": "，",
    ": ": "：",
    # checkpoints
    "Checkpoints": "检查点",
    "validation loss": "验证损失",
    "validation loss (DPO)": "验证损失（DPO）",
    "best": "最好",
    "None was kept.": "没有保留检查点。",
    "Resumed from step {step}, which {ranks} ranks had saved.": "从第 {step} 步继续，该检查点由 {ranks} 个进程保存。",
    # use
    "How to load what it learned": "如何加载训练结果",
    "with PEFT; merged": "用 PEFT 加载；合并",
    "served by vLLM": "用 vLLM 提供服务",
    "path/to: wherever the folder of the base lies": "path/to：换成基座模型目录实际所在的位置",
    "path/to: HOME/.cache/spotune/models, no ~; fab train --model tiny --here makes it there": (
        "path/to：主目录/.cache/spotune/models（写完整路径，不能用 ~），由 fab train --model tiny --here 生成"
    ),
    "no hub has the base; without its folder: {command}, then": "Hub 上没有这个基座；没有它的目录时：{command}，然后",
    "a plain model, where one is wanted": "需要普通模型时才用这一行",
    "vLLM serves no such adapter: merge it, and serve the merged model": (
        "vLLM 不支持这种适配器：请先合并，再提供合并后的模型"
    ),
    # origin
    "Made from": "来源",
    "base model": "基座模型",
    "base model's files, sha256": "基座模型文件的 sha256",
    "data as prepared, sha256": "处理后的数据的 sha256",
    "began with": "起点",
    "the adapter of {run}, step {step}": "{run} 第 {step} 步的适配器",
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
    "{file} line {number}": "{file} 第 {number} 行",
    "{file} record {number}": "{file} 第 {number} 条",
    "{file} row {number}": "{file} 第 {number} 行",
    "{file} lines {numbers}": "{file} 第 {numbers} 行",
    "{file} records {numbers}": "{file} 第 {numbers} 条",
    "{file} rows {numbers}": "{file} 第 {numbers} 行",
    "{count} records: {why} ({places})": "{count} 条记录：{why}（{places}）",
    "{count} records: the first {why} ({places})": "{count} 条记录，其中第一条{why}（{places}）",
    "{places}, ...": "{places}等",
    "{one}, {other}": "{one}、{other}",
    " of ": " 条 ",
    " and ": " 和 ",
    ", or ": " 或 ",
    "bad": "有错误",
    # recipe
    "Recipe": "配方",
    "All of recipe.toml": "完整的 recipe.toml",
    "goal": "目标",
    "tuning": "微调方式",
    "adapter rank": "适配器的秩",
    "adapter alpha": "适配器的 alpha",
    "adapted layers": "带适配器的层",
    "adapter dropout": "适配器的 dropout",
    "highest learning rate": "最高学习率",
    "schedule": "学习率曲线",
    "warm-up steps": "预热步数",
    "rows a step": "每步行数",
    "rows a rank holds at once": "每个进程一次处理的行数",
    "tokens of a record, at most": "每条记录最多 token 数",
    "batching": "批处理方式",
    "epochs": "轮数",
    "computed in": "计算精度",
    "base model kept in": "基座模型保存精度",
    "strategy": "策略",
    "layers computed again": "梯度检查点（重新计算的层）",
    "share held out": "留作验证的比例",
    "seed": "随机种子",
    "Versions": "版本",
    # answers
    "Held-out answers": "验证数据上的回答",
    "Base and tuned model were not measured on the records held out yet; this page shows their answers after:": (
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
    "The only one was trained on: its loss says nothing about new records.": (
        "唯一的一条参与过训练：它的损失不能说明新数据上的表现。"
    ),
    "All {samples} were trained on: their loss says nothing about new records.": (
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
    # what was in the data
    "What was in the data": "数据里有什么",
    "{samples} samples of {tokens} tokens, {learned} of them learned (train_on = {train_on}); {batching}: "
    "{rows} rows, {full}% full.": (
        "{samples} 个样本，共 {tokens} 个 token，其中 {learned} 个参与学习（train_on = {train_on}）；"
        "{batching}：{rows} 行，装满 {full}%。"
    ),
    "{steps} steps.": "共 {steps} 步。",
    "Held out: {records} records, {tokens} tokens.": "留作验证：{records} 条记录，{tokens} 个 token。",
    "Bad records": "有错误的记录",
    "and {count} more": "还有 {count} 条",
    "Tokens of a sample, before it is cut at max_length {length}": "样本的 token 数（按 max_length {length} 截断之前）",
    "median {median}, 95% have at most {p95}, longest {longest}": "中位数 {median}，95% 不超过 {p95}，最长 {longest}",
    "cut": "截断",
    "{least} to {most}": "{least} 到 {most}",
    "Duplicates and leaks": "重复与泄漏",
    "{one} is the same as {other}": "{one} 与 {other} 相同",
    "{one} (held out) asks what {other} asks": "{one}（验证）与 {other} 问的是同一个问题",
    "Samples": "样本",
    "As the model sees them: {learned}, the rest is read, {special} are underlined.": (
        "模型看到的样子：{learned}，其余只读，{special} 带下划线。"
    ),
    "green is learned": "绿色的要学",
    "special tokens": "特殊 token",
    "{where}, sample {number} of {of}": "{where}，第 {number} / {of} 个样本",
    "held out": "验证",
    "{learned} of {tokens} tokens learned": "{tokens} 个 token 中学习 {learned} 个",
    "{count} cut off": "截去 {count} 个",
    "({count} more token)": "（还有 {count} 个 token）",
    "({count} more tokens)": "（还有 {count} 个 token）",
    # remarks on data
    "{count} bad record": "{count} 条有错误的记录",
    "{count} bad records": "{count} 条有错误的记录",
    "{count} record": "{count} 条记录",
    "{count} records": "{count} 条记录",
    "{count} held-out record": "{count} 条验证记录",
    "{count} held-out records": "{count} 条验证记录",
    "left out, as --skip-bad asks": "已按 --skip-bad 舍弃",
    "mend them, or leave them out with --skip-bad": "请修正，或用 --skip-bad 舍弃",
    "mend them": "请修正",
    "{count} to learn from; with fewer than {fewest} only --anyway starts": (
        "可学的只有 {count} 条；少于 {fewest} 条时，要加 --anyway 才会开始"
    ),
    "{records} left out: nothing to learn within max_length": "舍弃 {records}：在 max_length 之内没有可学的内容",
    "no sample has the end of an answer in it, so the model would not learn to stop": (
        "没有样本包含回答的结束标记，模型学不会停下来"
    ),
    "{records} with special tokens in the words ({marks})": "{records}的文字里有特殊 token（{marks}）",
    "the chat template writes its own; give the words without them": "聊天模板自己会写这些；请给出不带它们的文字",
    "all of a text is learned, also what the user says in it; give messages to learn the answers alone": (
        "text 会整个被学习，包括其中用户说的话；只想学回答，请改成 messages"
    ),
    "keys of records that are not read: {keys}": "记录里没有读取的键：{keys}",
    "{records} the same as one before": "{records}与前面的重复",
    "of {held_out} {leaked} in the training data too: a loss on what was learned says nothing": (
        "{held_out}中有 {leaked} 条也在训练数据里：在学过的内容上测损失没有意义"
    ),
    "of {held_out} {leaked} in the training data too, and the questions of {more} more: "
    "a loss on what was learned says nothing": (
        "{held_out}中有 {leaked} 条也在训练数据里，另有 {more} 条问题相同、回答不同：在学过的内容上测损失没有意义"
    ),
    "of {held_out} none in the training data too; the same question with another answer: {more}": (
        "{held_out}中没有一条与训练数据重复；有 {more} 条问题相同、回答不同"
    ),
    "{count} sample": "{count} 个样本",
    "{count} samples": "{count} 个样本",
    "{cut} of {samples} is cut at max_length {length}, {tokens} tokens in all": (
        "{samples}中有 {cut} 个在 max_length {length} 处截断，共 {tokens} 个 token"
    ),
    "{cut} of {samples} are cut at max_length {length}, {tokens} tokens in all": (
        "{samples}中有 {cut} 个在 max_length {length} 处截断，共 {tokens} 个 token"
    ),
    "; a run that cuts most of them does not start": "；大多数都被截断的训练不会启动",
    ", which is the most that the model takes": "；模型最长也只能这样",
    "; --set max_length={most} would cut none": "；--set max_length={most} 就不会截断",
    "; --set max_length={most} is the most that the model takes": "；--set max_length={most} 是模型能接受的最长",
}


@dataclass(frozen=True)
class Words:
    """Says texts in a language; what has no Chinese is said in English."""

    language: str = "en"

    def __call__(self, text: str, /, **values: Any) -> str:
        return (ZH.get(text, text) if self.language == "zh" else text).format(**values)


ENGLISH = Words()
