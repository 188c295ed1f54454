"""Operations of a hosted module that ours take the place of: found in its code, with the same bits for every batch."""
