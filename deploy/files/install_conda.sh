# Installs conda at $prefix unless this very one is there: $file, from the first of $urls that has the pinned $sha256.
grep -qsx "$sha256" "$prefix/.spotune-installer" && exit 0
refuse() { echo "$1" >&2; exit "$refused"; }
[ "$(uname -m)" = x86_64 ] || refuse "$file is for x86_64 machines only"
installer=$prefix.sh
for url in $urls; do
  rm -f "$installer"
  curl -fsSL --retry 3 --connect-timeout 20 -o "$installer" "$url" &&
    echo "$sha256  $installer" | sha256sum --check --status && break
  rm -f "$installer"
done
[ -f "$installer" ] || refuse "no $file with the pinned sha256 at $(echo "$urls" | sed 's/ / or /g'): in cluster.toml \
[mirrors] miniforge names another place (preset = china: one in China), and [python] provider = \"venv\" needs none"
rm -rf "$prefix"
bash "$installer" -b -p "$prefix" && rm -f "$installer" && echo "$sha256" > "$prefix/.spotune-installer"
