"""IPA in small: tool tasks, rewarded at their end only, learnt from an expert's prefixes."""
