"""Music: artists, their albums and tracks, and the playlists they end up on."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import COUNTRIES, day, integer, person, pick, title

MUSIC = Domain(
    "music",
    (
        Table("artists", "artist", 45, (
            key("artist_id"), label("artist_name", title("Velvet Neon Paper Crimson Silver Hollow Wild Golden Midnight",
                                                         "Foxes Harbor Parade Lanterns Tigers Choir Engines Rivers")),
            category("country", pick(*COUNTRIES[:6])), category("genre", pick("rock", "pop", "jazz", "folk", "electronic")),
            level("debut_year", integer(1985, 2019)),
        )),
        Table("albums", "album", 90, (
            key("album_id"), label("album_title", title("Quiet Burning Distant Electric Broken Northern Glass Summer Lost Open",
                                                        "Signals Winter Maps Roads Mirrors Oceans Letters Stars Gardens Doors Cities")),
            ref("artist_id", "artists"), category("format", pick("vinyl", "cd", "digital")),
            date("release_date", day(2005, 2023)), level("critic_score", integer(35, 98), null=0.15),
        )),
        Table("tracks", "track", 260, (
            key("track_id"), label("track_name", title(
                "Falling Running Dancing Waiting Dreaming Sailing Shining Turning Calling Fading Rising Breathing Drifting Burning Singing Hiding Racing Floating",
                "Home Away Alone Tonight Slowly Forever Backwards Underwater Again Together Blind Free Upstream Softly Outside Sideways Loudly Sober Barefoot")),
            ref("album_id", "albums"), category("mood", pick("calm", "happy", "dark", "energetic")),
            measure("duration", integer(95, 520), "INTEGER"), measure("play_count", integer(120, 98000), "INTEGER"),
        )),
        Table("playlists", "playlist", 40, (
            key("playlist_id"), label("playlist_name", title("Morning Evening Workout Party Rainy Sunday Focus Road Retro",
                                                             "Mix Beats Classics Favorites Vibes Sessions")),
            category("visibility", pick("public", "private", "shared")), label("owner_name", person()),
            date("created_date", day(2015, 2024)), level("follower_count", integer(3, 5200)),
        )),
        Table("playlist_entries", "playlist entry", 240, (
            key("playlist_entry_id"), ref("playlist_id", "playlists"), ref("track_id", "tracks"),
            date("added_date", day(2018, 2024)), level("entry_rating", integer(1, 5), null=0.3),
        )),
    ),
)  # fmt: skip
