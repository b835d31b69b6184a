from phalanx.cost.block import Block, Walk
from phalanx.cost.backward_parts import SplitBlock
class ExpertsBlock(Block):
    def __init__(self, *given, rows, **named):
        super().__init__(*given, **named)
        self.rows=rows
class SplitExpertsBlock(SplitBlock):
    def __init__(self, *given, rows, **named):
        super().__init__(*given, **named)
        self.rows=rows
