"""Judges that follow the official evaluators, for figures that can be compared with published ones.

`spider_ex` and `spider_test_suite` follow Spider's execution match, `bird_ex` and `soft_f1` BIRD's; each module says
where its rules come from. Rewards use the house rule of shared/reward/execution_match.py instead. All run in the SQL
sandbox: what a prediction writes happens on a private copy, and nothing it does can hold up an evaluation.
"""

from shared.evaluation.judges.bird import bird_ex, soft_f1
from shared.evaluation.judges.spider import spider_ex, spider_test_suite

__all__ = ["bird_ex", "soft_f1", "spider_ex", "spider_test_suite"]
