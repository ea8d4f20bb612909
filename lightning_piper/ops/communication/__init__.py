"""Operations that move values between devices, or combine values of several devices."""
