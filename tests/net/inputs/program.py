import torch

layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
