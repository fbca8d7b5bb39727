# What ssh runs on a host (remote.go). It says which system this is, takes files into the cache,
# and becomes the launcher. Each line of its input is a request: HASH SIZE NAME for a file, which
# follows once this has said "send", or HASH run NAME for the launcher.
umask 077
cache="${XDG_CACHE_HOME:-$HOME/.cache}/euryale/run"
refuse() {
	echo "$*: remove it, or set XDG_CACHE_HOME on the host" >&2
	exit 3
}
mkdir -p "$cache" && cd "$cache" || refuse "the cache folder $cache cannot be used"
# From here on all paths are relative: whatever others make of the path, the folder is this one.
set -- $(ls -ldn .)
case "$1 $3" in
drwx------*" $(id -u)") ;;
*) refuse "the cache folder $cache must be a directory of this user alone, and is $1 of user $3" ;;
esac
new=".new.$(uname -n).$$"
trap 'rm -f "$new"' EXIT
# The first line ends what login scripts have left unfinished.
echo
echo "euryale-host $(uname -s) $(uname -m) $SSH_CONNECTION"
while read -r hash size name; do
	file="./$hash/$name"
	if [ "$size" = run ]; then # without the files that were used long ago, or that a crash has left
		find . -name ".new.*" -mtime +0 -exec rm -f {} +
		ls -dt sha256-* | tail -n +21 | while read -r old; do rm -rf "$old"; done
		exec "$file" host
	fi
	if [ -x "$file" ] && [ "$(wc -c <"$file")" -eq "$size" ]; then
		touch "$hash"
	else
		echo send
		if ! { mkdir -p "$hash" && head -c "$size" >"$new" &&
			[ "$(wc -c <"$new")" -eq "$size" ] && chmod 700 "$new" && mv -f "$new" "$file"; }; then
			rmdir "$hash"
			exit 4
		fi
	fi
	echo have
done
