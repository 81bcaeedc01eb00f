# A Debian root file system made by mmdebstrap, as an image.
FROM scratch
ADD os.tar /
