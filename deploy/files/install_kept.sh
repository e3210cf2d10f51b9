# Installs what is kept at $place of $packages and all they need. Ends well whatever comes of it: nothing may be kept for
# this distribution, or not all that is needed. $update and $apt_get are how apt is called everywhere.
kept=$place/$(. /etc/os-release; echo "$ID-$VERSION_ID")-$(dpkg --print-architecture)
[ -f "$kept/Packages" ] && own=$(mktemp -d) && mkdir -p "$own/lists/partial" || exit 0
echo "deb [trusted=yes] file:$kept ./" > "$own/kept.list"
alone="-o Dir::Etc::SourceList=$own/kept.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$own/lists"
alone="$alone -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root"
$update $alone && env $apt_get $alone --no-remove install $packages
rm -rf "$own"
