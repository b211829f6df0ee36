"""The demo domains, one module each."""

from data.demo.domains.company import COMPANY
from data.demo.domains.flights import FLIGHTS
from data.demo.domains.hospital import HOSPITAL
from data.demo.domains.insurance import INSURANCE
from data.demo.domains.league import LEAGUE
from data.demo.domains.library import LIBRARY
from data.demo.domains.museum import MUSEUM
from data.demo.domains.music import MUSIC
from data.demo.domains.real_estate import REAL_ESTATE
from data.demo.domains.restaurants import RESTAURANTS
from data.demo.domains.school import SCHOOL
from data.demo.domains.shop import SHOP

DOMAINS = (
    COMPANY,
    FLIGHTS,
    HOSPITAL,
    INSURANCE,
    LEAGUE,
    LIBRARY,
    MUSEUM,
    MUSIC,
    REAL_ESTATE,
    RESTAURANTS,
    SCHOOL,
    SHOP,
)
