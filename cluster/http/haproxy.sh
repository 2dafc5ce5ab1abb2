#!/bin/sh
# HAProxy as Ray Serve should start it: RAY_SERVE_HAPROXY_BINARY_PATH names this file. The program itself is
# SPLITSERVE_HAPROXY, or the first on the PATH. Serve's config for it, but
# - a request's headers have to come within 30 s: connections with half a head could keep all others out;
# - statistics are for this machine only;
# - where an ingress has died, it says what Serve's proxy says (proxy_answers.py), not 500 in plain text;
# - nothing is spliced (-dS): Serve has it splice requests, and one whose body comes in a packet of its own, as from
#   most clients, is then worked on to its end although the client has gone (HAProxy 2.8.25).
lost='{"error":{"message":"the process that took this request has ended; it can be sent again","type":"server_error","param":null,"code":"ingress_lost"}}'
before=
for argument in "$@"; do
    if [ "$before" = -f ] && ! grep -q 'timeout http-request' "$argument"; then
        sed -i -e '/^defaults/a\    timeout http-request 30s' \
            -e '/^frontend prometheus/,/^frontend http/s/^\( *bind \):/\1127.0.0.1:/' \
            -e '/^listen stats/,$s/^\( *bind \)\*:/\1127.0.0.1:/' "$argument" || exit
        errors=$(sed -n 's/^ *errorfile 502 //p' "$argument")
        [ -z "$errors" ] || printf 'HTTP/1.1 503 Service Unavailable\r\n%s\r\n%s\r\n%s %d\r\n\r\n%s' 'Retry-After: 1' \
            'Content-Type: application/json' 'Content-Length:' "${#lost}" "$lost" > "$errors" || exit
    fi
    before=$argument
done
# A Ray that is killed would leave it behind, with the port.
ending=
if [ "${SPLITSERVE_HAPROXY_ENDS_WITH_RAY:-}" = 1 ] && command -v setpriv > /dev/null; then
    ending="setpriv --pdeathsig TERM"
fi
exec $ending "${SPLITSERVE_HAPROXY:-haproxy}" -dS "$@"
