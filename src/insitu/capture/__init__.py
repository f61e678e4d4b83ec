"""What a model computes on whole data sets, written to disk."""

from insitu.capture.capture import capture as capture
from insitu.capture.captured import Captured as Captured
