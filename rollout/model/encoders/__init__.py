"""Operations of encoders beside a decoder, as of images."""
