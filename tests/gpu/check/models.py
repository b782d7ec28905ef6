"""The models whose memory the part `analyze` compares: a name, the model, inputs for a batch size, and the loss of its outputs."""
import torch


class CnnLstm(torch.nn.Module):
    """Convolutions over a series, then an LSTM: 128 steps of 64 values in, one of ten classes out."""

    def __init__(self):
        super().__init__()
        layers, width = [], 64
        for channels in (128, 256):
            layers += [torch.nn.Conv1d(width, channels, 3, padding=1), torch.nn.BatchNorm1d(channels), torch.nn.ReLU()]
            width = channels
        self.convolutions = torch.nn.Sequential(*layers)
        self.lstm = torch.nn.LSTM(width, 256, num_layers=2, batch_first=True, dropout=0.2)
        self.head = torch.nn.Linear(256, 10)

    def forward(self, series):
        steps, _ = self.lstm(self.convolutions(series).transpose(1, 2))
        return self.head(steps[:, -1])


def classes(outputs):
    labels = torch.zeros(len(outputs), dtype=torch.long, device=outputs.device)
    return torch.nn.functional.cross_entropy(outputs, labels)


def texts(tokens, is_language_model):
    def sample(size):
        ids = torch.randint(0, 30000, (size, tokens))
        return {"input_ids": ids, "labels": ids if is_language_model else torch.zeros(size, dtype=torch.long)}
    return sample


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config())


def bert():
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig())


def resnet50():
    from torchvision.models import resnet50
    return resnet50()


MODELS = {
    "ResNet-50": (resnet50, lambda size: torch.randn(size, 3, 224, 224), classes),
    "GPT-2": (gpt2, texts(1024, True), None),
    "BERT-base": (bert, texts(256, False), None),
    "CNN-LSTM": (CnnLstm, lambda size: torch.randn(size, 64, 128), classes),
}
