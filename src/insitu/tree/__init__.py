"""Nodes, places and the outline of a model. Knows neither torch nor vLLM."""

from insitu.tree.call import Call as Call
from insitu.tree.call import first_argument as first_argument
from insitu.tree.model_places import ModelPlaces as ModelPlaces
from insitu.tree.named import Named as Named
from insitu.tree.named import named as named
from insitu.tree.node import Node as Node
from insitu.tree.node import path_of as path_of
from insitu.tree.outline import Module as Module
from insitu.tree.outline import Outline as Outline
from insitu.tree.outline import join as join
from insitu.tree.outline_page import outline_html as outline_html
from insitu.tree.patterns import matching as matching
from insitu.tree.place import LOGITS as LOGITS
from insitu.tree.place import RESULT as RESULT
from insitu.tree.place import SAMPLES as SAMPLES
from insitu.tree.place import STEP as STEP
from insitu.tree.place import Place as Place
from insitu.tree.session import Session as Session
from insitu.tree.session import current as current
from insitu.tree.session import session_for as session_for
from insitu.tree.source import Listing as Listing
from insitu.tree.source import Operation as Operation
from insitu.tree.streams import LAYER_STREAMS as LAYER_STREAMS
from insitu.tree.streams import LayerStream as LayerStream
